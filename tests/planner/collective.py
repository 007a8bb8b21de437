"""One of two ranks that plan together, in a process of its own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import SimpleQueue

import torch.distributed as dist

from tests.planner.machines import table, topology
from tierstore.errors import InfeasiblePlanError
from tierstore.planner import EmbeddingShardingPlanner

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.planner.collective"])  # both ranks need torch imported once


def plan_together(rank: int, store: str, answers: SimpleQueue) -> None:
    """Answers (the plan, the error of a plan that does not fit, its missing bytes)."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    planner = EmbeddingShardingPlanner(topology(), batch_size=64, search_seconds=0.1)
    plan = planner.collective_plan([table("a"), table("b", 5_000)])
    try:
        small = topology(ssd_per_host="1MB")
        EmbeddingShardingPlanner(small, search_seconds=0.1).collective_plan([table(rows=400_000_000)])
    except InfeasiblePlanError as error:
        answers.put((plan.to_dict(), str(error), error.missing_bytes))
    dist.destroy_process_group()  # else its threads may meet the end of the process
