"""What-if questions: which bytes would make the tables fit, and which better machines would help most."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tierstore.config import format_bytes
from tierstore.planner.solver import Solution, divided, placed_again, solve
from tierstore.planner.topology import Topology

FIELDS = {"hbm": "hbm_per_rank", "host_memory": "host_memory_per_host", "ssd": "ssd_per_host"}
"""Fields of Topology by the names of resources."""
_GIB = 1 << 30
_HALVINGS = 5
_SLOWER = 3.0  # than what there is time for: a search that is cut off may still find something
_ROUNDS = 30  # of adding what is missing: what tiers take beside their slots grows with them, ever less
_MORE = {"HBM per rank": ("hbm_per_rank", 10), "host memory per host": ("host_memory_per_host", 4)}
_FASTER = {
    "hbm_bw": "twice the HBM bandwidth",
    "index_rows_per_s": "twice the rate of the slot index",
    "intra_host_bw": "twice the bandwidth within a host",
    "inter_host_bw": "twice the bandwidth between hosts",
    "host_link_bw": "twice the bandwidth between host and device",
}


def missing_bytes(solution: Solution, seconds: float) -> dict[str, int]:
    """Return bytes per rank or host by resource that are enough for the tables to fit.

    With some 3 % less of any of them no plan was found, as far as the seconds reach.
    """
    until, found = time.perf_counter() + seconds, solution
    lack: Counter[str] = Counter()
    for _ in range(3):
        lack += _until_it_fits(found)
        if time.perf_counter() > until:
            return dict(lack)
        found = solve(_with(solution, lack).problem, seconds / 12)
        if not found.caches.missing:
            break
    for name, high in list(lack.items()) if not found.caches.missing else ():
        low = 0
        for _ in range(_HALVINGS):
            if time.perf_counter() > until:
                break
            middle = (low + high) // 2
            problem = _with(solution, {**lack, name: middle}).problem
            low, high = (middle, high) if solve(problem, seconds / 12).caches.missing else (low, middle)
        lack[name] = high
    return dict(lack)


def _until_it_fits(solution: Solution) -> Counter[str]:
    """Return what these options and ranks lack: bytes per rank or host by resource."""
    lack: Counter[str] = Counter()
    found = solution
    for _ in range(_ROUNDS):
        worst: Counter[str] = Counter()
        for (name, _place), size in found.caches.missing.items():
            worst[name] = max(worst[name], size)
        if not worst:
            break
        lack += worst
        found = _with(solution, lack)
    return lack


def _with(solution: Solution, more: Mapping[str, int]) -> Solution:
    """Return the same options and ranks on machines with so many bytes more."""
    old = solution.topology
    return _on(solution, {FIELDS[name]: getattr(old, FIELDS[name]) + size for name, size in more.items()})


def _on(solution: Solution, changes: Mapping[str, Any]) -> Solution:
    """Return the same options and ranks on other machines, with the memories divided anew."""
    problem = replace(solution.problem, topology=replace(solution.topology, **changes))
    return divided(problem, placed_again(problem, solution.placed))


def what_would_help(solution: Solution, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """Return (changes of the machines by what the step would become, best first; whether planned again).

    Planning again lets tables follow with other options and ranks. Without as many seconds as that takes, the
    options and ranks stay.
    """
    changes, step = improvements(solution.topology), solution.prediction.step
    each = seconds / len(changes)
    again = solution.seconds <= _SLOWER * each
    result = []
    for text, change in changes.items():
        found = [_on(solution, change)]
        if again:  # the search may miss the options that it found before
            found.append(solve(found[0].problem, each))
        after = min((one.prediction.step for one in found if not one.caches.missing), default=step)
        if after < step * 0.999:
            result.append({"change": text, "step_s": after, "step_change": after / step - 1})
    return sorted(result, key=lambda item: item["step_s"]), again


def improvements(topology: Topology) -> dict[str, dict[str, Any]]:
    """Return fields of the topology that could be better, by words."""
    changes: dict[str, dict[str, Any]] = {}
    for words, (name, share) in _MORE.items():
        size = int(getattr(topology, name))
        more = max(_GIB, size // share // _GIB * _GIB)
        changes[f"+{format_bytes(more)} {words}"] = {name: size + more}
    changes |= {words: {name: 2 * getattr(topology, name)} for name, words in _FASTER.items()}
    if topology.ssd_per_host:
        drives = {name: 2 * getattr(topology, name) for name in ("ssd_read_iops", "ssd_bw", "ssd_write_bw")}
        curve = [(size, 2 * rate) for size, rate in topology.ssd_read_curve]
        changes["twice the SSD reads and writes per second"] = {**drives, "ssd_read_curve": curve}
    return changes
