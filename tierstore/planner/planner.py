"""The planner: tables and a topology in, a plan of cuts, ranks and bytes per tier out."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierstore.errors import ConfigError, InfeasiblePlanError
from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement, TablePlacement
from tierstore.planner.again import advice, what_is_missing
from tierstore.planner.allocate import Allocation, Placed, allocate
from tierstore.planner.bound import likely_cuts
from tierstore.planner.constraints import ParameterConstraints, constraints_of
from tierstore.planner.costs import Workload, exchange_seconds, row_sizes, tier_bytes
from tierstore.planner.cuts import cuts_of
from tierstore.planner.predict import Prediction, hit_rate, predict
from tierstore.planner.reading import with_reading
from tierstore.planner.report import at_least, report_of
from tierstore.planner.search import Search
from tierstore.planner.tables import TableSpec, prepared, spec_of_config
from tierstore.planner.topology import Topology

_ADAM_COPIES = 4  # parameter, gradient and two moments of the dense part
_MOST_HINTED = 1_000  # cuts of all tables, beyond which the linear programme takes long
_FEW_TABLES = 64
_SSD_TARGETS = (None, 0.98, 0.9, 0.75)


@dataclass(frozen=True, eq=False)
class Solution:
    """Everything that was decided, for reports and tests."""

    topology: Topology
    work: Workload
    tables: Sequence[TableSpec]
    placed: Sequence[Placed]
    caches: Allocation
    prediction: Prediction
    seconds: float


class EmbeddingShardingPlanner:
    """Decides for every table how it is cut, which ranks hold its shards, and their bytes in each tier.

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
        seed: int = 0,
    ) -> None:
        if not isinstance(topology, Topology):
            raise ConfigError(
                f"topology is {type(topology).__name__}; it must be a tierstore.planner.Topology"
            )
        work = workload or Workload()
        self.work = work if batch_size is None else replace(work, batch_size=batch_size)
        self.topology = topology
        self.constraints = {
            name: constraints_of(value, name) for name, value in _mapping("constraints", constraints).items()
        }
        self.stats = dict(_mapping("stats", stats))
        if not 0 <= search_seconds < math.inf:
            raise ConfigError(f"search_seconds is {search_seconds!r}; it must be seconds")
        self.search_seconds, self.seed = search_seconds, seed

    def plan(
        self, module: Any, sharders: Sequence[Any] | None = None, advice_seconds: float = 0.0
    ) -> ShardingPlan:
        """A plan for the collections in ``module``, or for a sequence of table configurations.

        ``sharders`` is accepted for torchrec's callers; every embedding collection is planned. The dense
        part of a module counts four times its parameters' bytes unless ``workload`` says ``dense_bytes``.
        With ``advice_seconds`` the report says what better machines would change by planning again for each,
        if that takes no longer; else with the same cuts and ranks.
        Raises InfeasiblePlanError if the tables do not fit, ConfigError for constraints that cannot be met.
        """
        tables, work = self._tables(module)
        start = time.perf_counter()
        solution = self.solve(tables, work)
        if solution.caches.missing:
            raise self._infeasible(solution, start)
        if crowded := solution.caches.crowded():
            raise ConfigError(f"{crowded}; let constraints cut the tables by rows over more ranks")
        promised = [name for name, demand in self.constraints.items() if demand.promises_memory]
        tables_placed = placements(solution, promised)
        report = report_of(solution, tables_placed, start)
        planned_again = advice(self, solution, advice_seconds)
        if planned_again is not None:
            report |= {"what_would_help": planned_again, "helps_by_planning_again": True}
        ranks = self.topology.world_size, self.topology.ranks_per_host
        return ShardingPlan(tables_placed, *ranks, self.topology.device, report)

    def collective_plan(
        self, module: Any, sharders: Sequence[Any] | None = None, pg: Any = None
    ) -> ShardingPlan:
        """Plans on rank 0 of the process group and gives every rank the same plan, or the same error."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return self.plan(module, sharders)
        if dist.get_world_size(pg) != self.topology.world_size:
            raise ConfigError(
                f"the topology has {self.topology.world_size} ranks and the process group "
                f"{dist.get_world_size(pg)}"
            )
        outcome: list[Any] = [None]
        if dist.get_rank(pg) == 0:
            try:
                outcome = [self.plan(module, sharders)]
            except Exception as error:  # every rank must leave the broadcast, and raise what rank 0 met
                outcome = [error]
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(pg, 0) if pg else 0, group=pg)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def solve(self, tables: Sequence[TableSpec], work: Workload | None = None) -> Solution:
        """The best solution found; ``caches.missing`` is not empty if the tables do not fit."""
        start = time.perf_counter()
        work = self._work_for(tables, work or self.work)
        twice = self.topology.one_fetcher and self.topology.ssd_per_host > 0
        solution = self._solve(tables, work, self.search_seconds * (0.6 if twice else 1.0))
        again = with_reading(self.topology, work, solution.caches)
        if again != work:
            second = self._solve(tables, again, self.search_seconds * 0.4)
            # What reads cost depends on the plan; each is to be judged by its own.
            solution = min((self._settled(found, work) for found in (solution, second)), key=_rank)
        lacking = {name for name, _ in solution.caches.missing}
        if lacking and "hbm" not in lacking and self.topology.ssd_per_host:
            solution = self._without_ssd(tables, work) or solution
        return replace(solution, seconds=time.perf_counter() - start)

    def on(self, topology: Topology, search_seconds: float) -> EmbeddingShardingPlanner:
        """A planner of the same tables' demands for other machines."""
        result = copy.copy(self)
        result.topology, result.search_seconds = topology, search_seconds
        return result

    def priced(self, solution: Solution) -> Solution:
        """The same cuts, ranks and rows per tier by this planner's topology and workload: what a plan made
        with other figures takes by these."""
        return self._settled(solution, self._work_for(solution.tables, self.work))

    def divided(self, solution: Solution) -> Solution:
        """The same cuts and ranks, with this planner's memories divided anew."""
        work = self._work_for(solution.tables, self.without_reading(solution.work))
        placed, _ = self._recut(solution, work)
        caches, prediction = self._divide(work, placed)
        found = Solution(self.topology, work, solution.tables, placed, caches, prediction, solution.seconds)
        return self._settled(found, work)

    def without_reading(self, work: Workload) -> Workload:
        """``work`` as it was before a plan said what reads cost."""
        return replace(work, rows_per_read=self.work.rows_per_read, read_waits=self.work.read_waits)

    def _settled(self, solution: Solution, work: Workload) -> Solution:
        """The same cuts, ranks and rows with reads at what they cost in this very plan."""
        placed, caches = self._recut(solution, work)
        work = with_reading(self.topology, work, caches)
        placed, caches = self._recut(solution, work)
        prediction = predict(self.topology, work, placed, caches)
        return Solution(self.topology, work, solution.tables, placed, caches, prediction, solution.seconds)

    def _without_ssd(self, tables: Sequence[TableSpec], work: Workload) -> Solution | None:
        """A store takes memory of its own, so what does not fit with one may do so without."""
        topology = self.topology
        memory = topology.hosts * topology.host_memory_per_host + topology.world_size * topology.hbm_per_rank
        if sum(size * count for size, count in row_sizes(tables).items()) > memory:
            return None
        other = self.on(replace(topology, ssd_per_host=0), self.search_seconds)
        found = other._solve(tables, work, self.search_seconds / 6)
        return None if found.caches.missing else found

    def _recut(self, solution: Solution, work: Workload) -> tuple[list[Placed], Allocation]:
        placed = []
        for item in solution.placed:
            table, shape = solution.tables[item.table], item.cut.shape
            demand = self.constraints.get(table.name, ParameterConstraints())
            cuts = cuts_of(table, self.topology, work, demand)
            cut = next(cut for cut in cuts if cut.shape == shape)
            placed.append(Placed(item.table, cut, item.ranks))
        costs = [item.cut.cost for item in placed for _ in item.ranks]
        return placed, replace(solution.caches, costs=costs)

    def _work_for(self, tables: Sequence[TableSpec], work: Workload) -> Workload:
        lookups = len(row_sizes(tables)) * self.topology.row_size_seconds["lookup"]
        return replace(
            work,
            tier_bytes=tier_bytes(tables, self.topology),
            lookup_seconds=lookups,
            exchange_seconds=exchange_seconds(tables, self.topology),
        )

    def _solve(self, tables: Sequence[TableSpec], work: Workload, seconds: float) -> Solution:
        start = time.perf_counter()
        first: Solution | None = None
        for target in _SSD_TARGETS:
            demands = self._demands(tables, work, target)
            placed = self._search(tables, work, demands, seconds if first is None else seconds / 6)
            caches, prediction = self._divide(work, placed)
            found = Solution(
                self.topology, work, tables, placed, caches, prediction, time.perf_counter() - start
            )
            if not caches.missing:
                return found
            first = first or found
            if not any(resource == "ssd" for resource, _ in first.caches.missing):
                break
        assert first is not None
        return first

    def _divide(self, work: Workload, placed: Sequence[Placed]) -> tuple[Allocation, Prediction]:
        """The best of some ways to divide the memories; all but the first are for when SSDs set the step."""
        results = []
        for for_ssd, gradual in ((False, False), (True, False), (False, True), (True, True)):
            caches = allocate(self.topology, work, placed, for_ssd, gradual)
            results.append((caches, predict(self.topology, work, placed, caches)))
            if results[0][1].slowest()[0] not in ("ssd", "fetch"):
                break
        best = min(results, key=_quality)
        waits = best[1].slowest()[0] in ("ssd", "fetch") and not best[0].missing
        if waits and len(placed) <= _FEW_TABLES:
            # A store's index comes or goes with the last row, so which single table spills is worth a try.
            everyone = {item.table for item in placed}
            for spilling in sorted(everyone):
                caches = allocate(self.topology, work, placed, whole=everyone - {spilling})
                best = min(best, (caches, predict(self.topology, work, placed, caches)), key=_quality)
        return best

    def _search(
        self,
        tables: Sequence[TableSpec],
        work: Workload,
        demands: Sequence[ParameterConstraints],
        seconds: float,
    ) -> list[Placed]:
        cuts = [cuts_of(table, self.topology, work, d) for table, d in zip(tables, demands, strict=True)]
        everyone = np.arange(self.topology.world_size)
        allowed = [
            everyone if d.device_group is None else np.unique(np.array(d.device_group)) for d in demands
        ]
        hint = None
        if sum(map(len, cuts)) <= _MOST_HINTED and not any(d.device_group is not None for d in demands):
            hint = likely_cuts(self.topology, work, cuts, seconds / 4)
        search = Search(self.topology, work, cuts, allowed, seconds, self.seed, hint)
        return [
            Placed(t, cuts[t][choice.cut], choice.ranks.tolist()) for t, choice in enumerate(search.run())
        ]

    def _demands(
        self, tables: Sequence[TableSpec], work: Workload, target: float | None
    ) -> list[ParameterConstraints]:
        """The constraints; with a ``target``, so many small tables must stay in memory that the others
        take at most this share of the SSD."""
        demands = [self.constraints.get(table.name, ParameterConstraints()) for table in tables]
        room = self.topology.ssd_per_host * self.topology.hosts
        if not room or target is None:
            return demands
        costs = [cuts_of(t, self.topology, work, d)[0].cost for t, d in zip(tables, demands, strict=True)]
        stored = [0 if cost.in_memory else cost.ssd_bytes for cost in costs]
        excess = sum(stored) - target * room
        for i in sorted(range(len(tables)), key=lambda i: costs[i].rows * costs[i].slot_bytes):
            if excess <= 0:
                break
            if stored[i]:
                demands[i] = replace(demands[i], tiers=("hbm", "uvm"))
                excess -= stored[i]
        return demands

    def _tables(self, module: Any) -> tuple[list[TableSpec], Workload]:
        work = self.work
        if hasattr(module, "named_modules"):
            tables, dense = tables_of_module(module)
            if not work.dense_bytes:
                work = replace(work, dense_bytes=dense)
        elif isinstance(module, Iterable) and not isinstance(module, str | Mapping):
            tables = [spec_of_config(item) for item in module]
        else:
            raise ConfigError(f"cannot plan a {type(module).__name__}: give a module or table configurations")
        return prepared(tables, self.constraints, self.stats, self.topology.world_size), work

    def _infeasible(self, solution: Solution, start: float) -> InfeasiblePlanError:
        report = report_of(solution, placements(solution), start, what_is_missing(self, solution))
        return InfeasiblePlanError(
            f"the tables do not fit: {report['binding']} is short of "
            f"{at_least(report['missing_bytes'])} ({report['binding_detail']}); {report['what_to_change']}",
            report["binding"],
            report["missing_bytes"],
            report,
        )


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {type(value).__name__}; it must be a mapping of table names")
    return value or {}


def _rank(solution: Solution) -> tuple[int, float]:
    return _quality((solution.caches, solution.prediction))


def _quality(divided: tuple[Allocation, Prediction]) -> tuple[int, float]:
    return sum(divided[0].missing.values()), divided[1].step


def tables_of_module(module: Any) -> tuple[list[TableSpec], int]:
    """The tables of all embedding collections in a module, ours or torchrec's; device bytes of the rest."""
    tables: list[TableSpec] = []
    inside: list[str] = []
    for path, part in module.named_modules():
        configs = getattr(part, "embedding_bag_configs", None) or getattr(part, "embedding_configs", None)
        if configs is None or any(path.startswith(f"{outer}.") for outer in inside if outer):
            continue
        weighted = getattr(part, "is_weighted", False)
        weighted = bool(weighted() if callable(weighted) else weighted)
        optimizer = _optimizer_of(part)
        tables += [
            replace(spec_of_config(config, path, weighted), **optimizer)
            for config in (configs() if callable(configs) else configs)
        ]
        inside.append(path)
    if not tables:
        raise ConfigError("the module has no embedding collection to plan")
    dense = 0
    for name, parameter in module.named_parameters():
        if not any(not outer or name.startswith(f"{outer}.") for outer in inside):
            dense += parameter.numel() * parameter.element_size() * _ADAM_COPIES
    return tables, dense


def _optimizer_of(collection: Any) -> dict[str, Any]:
    """The optimizer of a collection of ours; torchrec's do not know theirs."""
    name = getattr(getattr(getattr(collection, "engine", None), "optimizer", None), "name", None)
    return {} if name is None else {"optimizer": name}


def placements(solution: Solution, promised: Collection[str] = ()) -> tuple[TablePlacement, ...]:
    """The solution as plain placements, in the order of the tables. Tables in ``promised`` have their slots
    to themselves."""
    caches = solution.caches
    columns = [caches.hbm_bytes(), caches.uvm_bytes(), caches.ssd_bytes()]
    columns += [caches.hbm_rows.astype(np.int64), (caches.memory_rows - caches.hbm_rows).astype(np.int64)]
    sizes = np.column_stack(columns).tolist()
    result, first = [], 0
    for item in solution.placed:
        spec, end = solution.tables[item.table], first + len(item.ranks)
        shards = tuple(_shard(spec, item, j, sizes[first + j]) for j in range(len(item.ranks)))
        if spec.name in promised:
            shards = tuple(replace(shard, own=1) for shard in shards)
        rate = round(hit_rate(caches, slice(first, end)), 6)
        size = spec.num_embeddings, spec.embedding_dim
        result.append(TablePlacement(spec.name, item.cut.kind, shards, rate, spec.module, *size))
        first = end
    return tuple(result)


def _shard(spec: TableSpec, item: Placed, j: int, sizes: Sequence[int]) -> ShardPlacement:
    """Shard ``j`` of a table: shards are ordered by columns, then rows, and differ by one row or column at
    most. ``sizes``: bytes of the tiers, then rows of the memory tiers."""
    cut = item.cut
    column, row = (0, 0) if cut.kind is ShardingType.DATA_PARALLEL else divmod(j, cut.row_cuts)
    rows = [part * spec.num_embeddings // cut.row_cuts for part in (row, row + 1)]
    columns = [part * spec.embedding_dim // cut.column_cuts for part in (column, column + 1)]
    return ShardPlacement(
        int(item.ranks[j]), rows[0], rows[1] - rows[0], columns[0], columns[1] - columns[0], *sizes
    )
