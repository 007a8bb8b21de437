"""Tables cut over the ranks of a torch.distributed job, every shard in tiers of its own."""

from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement, TablePlacement
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.comms import CommsConfig
from tierstore.sharding.embedding_bag_collection import ShardedEmbeddingBagCollection
from tierstore.sharding.embedding_collection import ShardedEmbeddingCollection
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.opening import ShardingOptions
from tierstore.sharding.optimizer import KeyedFusedOptimizer
from tierstore.sharding.parallel import DistributedModelParallel, shard
from tierstore.sharding.shard_views import sharded_state_dict
from tierstore.sharding.stored import StoredTables, open_tables
from tierstore.sharding.table_sharding import (
    TableSharding,
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

__all__ = [
    "CommsConfig",
    "DistributedModelParallel",
    "KeyedFusedOptimizer",
    "ShardPlacement",
    "ShardedCollection",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingOptions",
    "ShardingPlan",
    "ShardingType",
    "StoredTables",
    "TablePlacement",
    "TableSharding",
    "column_wise",
    "construct_plan",
    "data_parallel",
    "grid_shard",
    "open_tables",
    "row_wise",
    "shard",
    "sharded_state_dict",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]
