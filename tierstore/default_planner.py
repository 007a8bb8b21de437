"""The planner that sharding asks where a user gives no plan; ``tierstore/__init__.py`` names tierstore's own.

Sharding knows plans by ``placement.py`` alone, so it works with any planner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.placement import Job, ShardingPlan

    JobPlanner = Callable[[Any, Job, Any], ShardingPlan]
    """Called by all ranks, with a module, the ranks of its job and their process group. Returns a plan of the
    module's collections, or raises ``InfeasiblePlanError`` if they do not fit."""

_planners: list[JobPlanner] = []


def register_default_planner(planner: JobPlanner) -> None:
    """Let ``planner`` make the plans from now on."""
    _planners[:] = [planner]


def plan_job(module: Any, job: Job, group: Any) -> ShardingPlan:
    """Return the plan of the planner that was registered last; all ranks of process group ``group`` call
    this."""
    return _planners[0](module, job, group)
