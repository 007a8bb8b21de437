"""Planning again for other machines: how much of what is missing, and what would help most."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tierstore.planner.report import FIELDS, improvements

if TYPE_CHECKING:
    from tierstore.planner.planner import EmbeddingShardingPlanner, Solution

_HALVINGS = 5
_SLOWER = 3.0  # than what there is time for: a search that is cut off may still find something
_ROUNDS = 30  # of adding what is missing: what tiers take beside their slots grows with them, ever less


def what_is_missing(planner: EmbeddingShardingPlanner, solution: Solution) -> dict[str, int]:
    """Bytes per rank or host by resource, such that with these the tables fit, and with some 3 % less of any
    of them no plan was found, as far as the search's seconds reach."""
    until = time.perf_counter() + planner.search_seconds
    lack, found = _until_it_fits(planner, solution), False
    for _ in range(3):
        if time.perf_counter() > until:
            break
        tried = _with(planner, lack).solve(solution.tables, solution.work)
        found = not tried.caches.missing
        if found:
            break
        more = _until_it_fits(_with(planner, lack), tried)
        lack = {name: lack.get(name, 0) + more.get(name, 0) for name in {**lack, **more}}
    for name in list(lack) if found else []:
        low, high = 0, lack[name]
        for _ in range(_HALVINGS):
            if time.perf_counter() > until:
                break
            middle = (low + high) // 2
            less = _with(planner, {**lack, name: middle}).solve(solution.tables, solution.work)
            low, high = (middle, high) if less.caches.missing else (low, middle)
        lack[name] = high
    return lack


def _until_it_fits(planner: EmbeddingShardingPlanner, solution: Solution) -> dict[str, int]:
    """What this placement lacks: bytes per rank or host by resource."""
    lack: dict[str, int] = {}
    missing: Mapping[tuple[str, int], int] = solution.caches.missing
    for _ in range(_ROUNDS):
        if not missing:
            break
        worst: dict[str, int] = {}
        for (name, _place), size in missing.items():
            worst[name] = max(worst.get(name, 0), size)
        lack = {name: lack.get(name, 0) + worst.get(name, 0) for name in {**lack, **worst}}
        missing = _with(planner, lack).divided(solution).caches.missing
    return lack


def _with(planner: EmbeddingShardingPlanner, more: Mapping[str, int]) -> EmbeddingShardingPlanner:
    """A quick planner for machines with so many bytes more."""
    old = planner.topology
    changes: dict[str, Any] = {FIELDS[name]: getattr(old, FIELDS[name]) + size for name, size in more.items()}
    return planner.on(replace(old, **changes), planner.search_seconds / 12)


def advice(
    planner: EmbeddingShardingPlanner, solution: Solution, seconds: float
) -> list[dict[str, Any]] | None:
    """As :func:`report.what_would_help`, by planning again: tables may follow with other cuts and ranks.
    None if that would take much more than ``seconds``."""
    changes = improvements(solution.topology)
    each = seconds / len(changes)
    if solution.seconds > _SLOWER * each:
        return None
    step, work, result = solution.prediction.step, planner.without_reading(solution.work), []
    for text, change in changes:
        other = planner.on(replace(solution.topology, **change), each)
        # The search may miss the cuts that it found before.
        found = [other.solve(solution.tables, work), other.divided(solution)]
        after = min((one.prediction.step for one in found if not one.caches.missing), default=step)
        if after < step * 0.999:
            result.append({"change": text, "step_s": after, "step_change": after / step - 1})
    return sorted(result, key=lambda item: item["step_s"])
