"""Plans where tables go: how each is sharded, which ranks hold it, and how many bytes of each tier it gets.

The package imports nothing of the runtime, so plans for machines far away are made anywhere.
"""

from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement, TablePlacement
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.costs import Workload
from tierstore.planner.curves import MissCurve, Popularity
from tierstore.planner.planner import EmbeddingShardingPlanner
from tierstore.planner.tables import TableSpec
from tierstore.planner.topology import Topology

__all__ = [
    "EmbeddingShardingPlanner",
    "MissCurve",
    "ParameterConstraints",
    "Popularity",
    "ShardPlacement",
    "ShardingPlan",
    "ShardingType",
    "TablePlacement",
    "TableSpec",
    "Topology",
    "Workload",
]
