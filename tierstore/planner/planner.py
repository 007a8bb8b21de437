"""The planner: tables and a topology in, a plan of shards, ranks and bytes per tier out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierstore.errors import ConfigError, InfeasiblePlanError
from tierstore.placement import Job, ShardingPlan, ShardingType, ShardPlacement, TablePlacement
from tierstore.planner.checks import must_be, require
from tierstore.planner.constraints import ParameterConstraints, constraints_of
from tierstore.planner.costs import INDEX_BYTES_PER_ROW, RANK_BUFFERS, Problem, Workload
from tierstore.planner.options import Placed
from tierstore.planner.report import at_least, report_of, shortage
from tierstore.planner.solver import Solution, solve
from tierstore.planner.tables import TableSpec, prepared, spec_of_config
from tierstore.planner.topology import Topology
from tierstore.planner.what_if import missing_bytes, what_would_help

_ADAM_COPIES = 4  # parameter, gradient and two moments of the dense part
_LEAST_HBM = 1 << 20  # of a rank of a running job
_STAGING = 256 << 20  # bytes of host memory of such a rank, for rows on their way and rows read ahead


class EmbeddingShardingPlanner:
    """Decides for every table how it is sharded, which ranks hold its shards, and their bytes in each tier.

    - ``topology``: the machines; ``constraints``: by table name; ``stats``: recorded miss-ratio curves by
      table name (docs/planner.md has their form); tables without any are taken to have the preset popularity.
    - ``batch_size``: examples per rank and step. ``workload`` says it together with the dense part's cost.
    - ``search_seconds``: what the search may take at most; it stops earlier when nothing gets better.

    Equal arguments give equal plans as long as the search is not cut off by the clock.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        batch_size: int | None = None,
        workload: Workload | None = None,
        stats: Mapping[str, Mapping[str, Any]] | None = None,
        search_seconds: float = 5.0,
    ) -> None:
        kind = type(topology)
        must_be("topology", kind, isinstance(topology, Topology), "a tierstore.planner.Topology")
        work = workload or Workload()
        self.work = work if batch_size is None else replace(work, batch_size=batch_size)
        self.topology = topology
        for name, given in (("constraints", constraints), ("stats", stats)):
            mapping = given is None or isinstance(given, Mapping)
            require(mapping, f"{name} is {type(given).__name__}; it must be a mapping of table names")
        self.constraints = {name: constraints_of(value, name) for name, value in (constraints or {}).items()}
        self.stats = dict(stats or {})
        finite = 0 <= search_seconds < math.inf
        require(finite, f"search_seconds is {search_seconds!r}; it must be seconds")
        self.search_seconds = search_seconds

    def plan(
        self,
        module: Any,
        sharders: Sequence[Any] | None = None,
        advice_seconds: float = 0.0,
        simulate: Callable[[ShardingPlan], Any] | None = None,
    ) -> ShardingPlan:
        """Return a plan for the collections in ``module``, or for a sequence of table configurations.

        ``sharders`` is accepted for torchrec's callers; every embedding collection is planned. The dense
        part of a module counts four times its parameters' bytes unless ``workload`` says ``dense_bytes``.
        With ``advice_seconds`` the report says what better machines would change by planning again for each,
        if that takes no longer; else with the same options and ranks. ``simulate`` counts what the plan's
        tiers miss (``tierstore.simulation.Simulated``), in place of what curves say.
        Raises InfeasiblePlanError if the tables do not fit, ConfigError for constraints that cannot be met.
        """
        problem, start = self._problem_of(module), time.perf_counter()
        solution = solve(problem, self.search_seconds)
        if solution.caches.missing:
            raise self._infeasible(solution, start)
        crowded = solution.caches.crowded()
        require(not crowded, f"{crowded}; let constraints cut the tables by rows over more ranks")
        plan = plan_of(solution)
        helps, again = what_would_help(solution, advice_seconds)
        simulated = None if simulate is None else simulate(plan)
        if simulated is not None:
            solution = simulated.of(solution)
            plan = plan_of(solution)
        report = report_of(solution, plan) | {"what_would_help": helps, "helps_by_planning_again": again}
        report = report if simulated is None else simulated.added_to(report)
        return replace(plan, report={**report, "plan_seconds": time.perf_counter() - start})

    def collective_plan(
        self, module: Any, sharders: Sequence[Any] | None = None, pg: Any = None
    ) -> ShardingPlan:
        """Plan on rank 0 of the process group and give every rank the same plan, or raise the same error."""
        return plan_on_rank_0(lambda: self.plan(module, sharders), self.topology.world_size, pg)

    def problem(self, tables: Sequence[TableSpec]) -> Problem:
        """Return what this planner would have to solve for ``tables``.

        Raises ConfigError for doubled tables, and for constraints and stats of unknown ones.
        """
        known = prepared(tables, self.constraints, self.stats, self.topology.world_size)
        demands = [self.constraints.get(table.name, ParameterConstraints()) for table in known]
        tables = [replace(table, tiers=self.work.tiers or table.tiers) for table in known]
        return Problem(self.topology, self.work, tables, demands)

    def solve(self, tables: Sequence[TableSpec]) -> Solution:
        """Return the best solution found; ``caches.missing`` is not empty if the tables do not fit."""
        return solve(self.problem(tables), self.search_seconds)

    def _problem_of(self, module: Any) -> Problem:
        dense = 0
        if hasattr(module, "named_modules"):
            tables, dense = tables_of_module(module)
        elif isinstance(module, Iterable) and not isinstance(module, str | Mapping):
            tables = [spec_of_config(item) for item in module]
        else:
            raise ConfigError(f"cannot plan a {type(module).__name__}: give a module or table configurations")
        problem = self.problem(tables)
        return replace(problem, work=replace(self.work, dense_bytes=self.work.dense_bytes or dense))

    def _infeasible(self, solution: Solution, start: float) -> InfeasiblePlanError:
        report = report_of(solution, plan_of(solution))
        report |= shortage(solution, missing_bytes(solution, self.search_seconds))
        report["plan_seconds"] = time.perf_counter() - start
        return InfeasiblePlanError(
            f"the tables do not fit: {report['binding']} is short of "
            f"{at_least(report['missing_bytes'])} ({report['binding_detail']}); {report['what_to_change']}",
            report["binding"],
            report["missing_bytes"],
            report,
        )


def plan_on_rank_0(plan: Callable[[], ShardingPlan], world_size: int, pg: Any = None) -> ShardingPlan:
    """Call ``plan`` on rank 0 of a process group of ``world_size`` ranks, and return its plan on every rank,
    or raise the same error. Without torch.distributed, call it here."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return plan()
    ranks = dist.get_world_size(pg)
    require(world_size == ranks, f"the topology has {world_size} ranks and the process group {ranks}")
    outcome: list[Any] = [None]
    if dist.get_rank(pg) == 0:
        try:
            outcome = [plan()]
        except Exception as error:  # every rank must leave the broadcast, and raise what rank 0 met
            outcome = [error]
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(pg, 0) if pg else 0, group=pg)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def tables_of_module(module: Any) -> tuple[list[TableSpec], int]:
    """Return the tables of all embedding collections in a module, ours or torchrec's, and the other parts'
    device bytes."""
    tables: list[TableSpec] = []
    inside: list[str] = []
    for path, part in module.named_modules():
        configs = getattr(part, "embedding_bag_configs", None) or getattr(part, "embedding_configs", None)
        if configs is None or any(path.startswith(f"{outer}.") for outer in inside if outer):
            continue
        weighted = getattr(part, "is_weighted", False)
        weighted = bool(weighted() if callable(weighted) else weighted)
        # A collection of ours knows its optimizer and tiers; torchrec's do not.
        engine = getattr(part, "engine", None)
        for config in configs() if callable(configs) else configs:
            known: dict[str, Any] = {}
            if engine is not None:
                optimizer = part.fused_optimizer.spec_of(config.name).planned_name
                known = {"optimizer": optimizer, "tiers": engine.config}
            tables.append(replace(spec_of_config(config, path, weighted), **known))
        inside.append(path)
    require(tables, "the module has no embedding collection to plan")
    dense = sum(
        parameter.numel() * parameter.element_size() * _ADAM_COPIES
        for name, parameter in module.named_parameters()
        if not any(not outer or name.startswith(f"{outer}.") for outer in inside)
    )
    return tables, dense


def plan_of(solution: Solution) -> ShardingPlan:
    """Return the solution as a plan without a report; tables are in their order."""
    caches, result, topology = solution.caches, [], solution.problem.topology
    slots = [caches.hbm_rows, caches.memory_rows - caches.hbm_rows]
    sizes = [caches.hbm_bytes(), caches.uvm_bytes(), caches.ssd_bytes, *slots]
    each = iter(np.column_stack([*sizes, caches.own, caches.read_ahead_bytes()]).astype(np.int64).tolist())
    unique = caches.field("unique")
    misses = unique * solution.missed[0]
    for item, shards in zip(solution.placed, solution.shards(), strict=True):
        spec = solution.problem.tables[item.table]
        rate = 1 - float(misses[shards].sum() / (unique[shards].sum() or 1.0))  # replicas miss nothing
        placed = tuple(_shard(spec, item, j, next(each)) for j in range(len(item.ranks)))
        rest = spec.module, spec.num_embeddings, spec.embedding_dim
        demand = solution.problem.demands[item.table]
        rules = demand.stochastic_rounding, demand.bounds_check
        result.append(TablePlacement(spec.name, item.option.kind, placed, round(rate, 6), *rest, *rules))
    return ShardingPlan(tuple(result), topology.world_size, topology.ranks_per_host, topology.device)


def _shard(spec: TableSpec, item: Placed, j: int, sizes: Sequence[int]) -> ShardPlacement:
    """Return shard ``j`` of a table, with the ``sizes`` that are ShardPlacement's last fields.

    Shards are ordered by columns, then rows, and differ by one row or column at most.
    """
    option = item.option
    column, row = (0, 0) if option.kind is ShardingType.DATA_PARALLEL else divmod(j, option.row_cuts)
    rows = [part * spec.num_embeddings // option.row_cuts for part in (row, row + 1)]
    columns = [part * spec.embedding_dim // option.column_cuts for part in (column, column + 1)]
    sides = rows[0], rows[1] - rows[0], columns[0], columns[1] - columns[0]
    return ShardPlacement(int(item.ranks[j]), *sides, *sizes)


def plan_job(module: Any, job: Job, group: Any) -> ShardingPlan:
    """Return a plan of the collections of ``module`` for ``job``, with assumed rates.

    All ranks of the process group ``group`` call it. Raises InfeasiblePlanError if the tables do not fit.
    """
    machines, work = machines_of(job, tables_of_module(module)[1]), workload_of(job)
    touched = {name: ParameterConstraints(touched_rows=rows) for name, rows in job.touched_rows.items()}
    planner = EmbeddingShardingPlanner(machines, touched, workload=work, batch_size=job.batch_size)
    return planner.collective_plan(module, pg=group)


def machines_of(job: Job, dense_bytes: int, device: str | None = None) -> Topology:
    """Return the machines of a job: its budgets, and what its ranks need beside them.

    ``device``: the job's if None. ``dense_bytes``: of what is no table. These bytes are not in the budget of
    "hbm", unless ``device`` is "cuda" and its memory is the budget.
    """
    ranks, staging = job.ranks_per_host, RANK_BUFFERS + max(_STAGING, job.read_ahead_bytes or 0)
    # The store's index, rows read ahead and a rank's buffers are no part of uvm (docs/design.md).
    beside = job.rows * INDEX_BYTES_PER_ROW // job.hosts + staging * ranks if job.ssd_bytes else 0
    hbm = max(job.hbm_bytes, _LEAST_HBM) + (0 if device == "cuda" else dense_bytes)
    sizes = hbm, job.uvm_bytes * ranks + beside, job.ssd_bytes * ranks
    processors = job.processors_per_rank
    return Topology(job.hosts, ranks, *sizes, device=device or job.device, processors_per_rank=processors)


def workload_of(job: Job) -> Workload:
    """Return what a step of a job does beside its tables."""
    ahead = {name: n for name in ("depth", "window") if (n := getattr(job, name)) is not None}
    return Workload(**ahead, read_ahead=job.read_ahead_bytes, tiers=job.tiers)
