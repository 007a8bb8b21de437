"""Plans for the ranks of a running job: what sharding asks the planner where a user gives no plan."""

from __future__ import annotations

from typing import Any

from tierstore.placement import Job, ShardingPlan
from tierstore.planner.costs import INDEX_BYTES_PER_ROW, RANK_BUFFERS, Workload
from tierstore.planner.planner import EmbeddingShardingPlanner
from tierstore.planner.topology import Topology

_LEAST_HBM = 1 << 20
_STAGING = 256 << 20  # bytes of host memory per rank, for rows on their way and rows read ahead


def plan_job(module: Any, job: Job, group: Any) -> ShardingPlan:
    """Return a plan of the collections of ``module`` for ``job``, with assumed rates.

    All ranks of the process group ``group`` call it. Raises InfeasiblePlanError if the tables do not fit.
    """
    ahead = {name: n for name in ("depth", "window") if (n := getattr(job, name)) is not None}
    planner = EmbeddingShardingPlanner(
        topology_of(job),
        workload=Workload(**ahead, read_ahead=job.read_ahead_bytes),
        batch_size=job.batch_size,
    )
    return planner.collective_plan(module, pg=group)


def topology_of(job: Job) -> Topology:
    """Return the machines of ``job``."""
    ranks, staging = job.ranks_per_host, RANK_BUFFERS + max(_STAGING, job.read_ahead_bytes or 0)
    # The store's index, rows read ahead and a rank's buffers are no part of uvm (docs/design.md).
    beside = job.rows * INDEX_BYTES_PER_ROW // job.hosts + staging * ranks if job.ssd_bytes else 0
    sizes = max(job.hbm_bytes, _LEAST_HBM), job.uvm_bytes * ranks + beside, job.ssd_bytes * ranks
    return Topology(job.hosts, ranks, *sizes, device="cpu", processors_per_rank=job.processors_per_rank)
