"""What-if questions: which bytes would make the tables fit, and which better machines would help most."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tierstore.config import format_bytes
from tierstore.planner.solver import Solution, moved, solve
from tierstore.planner.topology import Topology

FIELDS = {"hbm": "hbm_per_rank", "host_memory": "host_memory_per_host", "ssd": "ssd_per_host"}
"""Fields of Topology by the names of resources."""
_GIB = 1 << 30
_HALVINGS = 5
_SLOWER = 3.0  # than what there is time for: a search that is cut off may still find something
_ROUNDS = 30  # of adding what is missing: what tiers take beside their slots grows with them, ever less
_MORE = {"HBM per rank": ("hbm_per_rank", 10), "host memory per host": ("host_memory_per_host", 4)}
_TWICE = {
    "HBM bandwidth": ("hbm_bw",),
    "rate of the slot index": ("index_rows_per_s",),
    "bandwidth within a host": ("intra_host_bw",),
    "bandwidth between hosts": ("inter_host_bw",),
    "bandwidth between host and device": ("host_link_bw",),
    "SSD reads and writes per second": ("ssd_read_iops", "ssd_bw", "ssd_write_bw"),
}


def missing_bytes(solution: Solution, seconds: float) -> dict[str, int]:
    """Return bytes per rank or host by resource that are enough for the tables to fit.

    With some 3 % less of any of them no plan was found, as far as the seconds reach.
    """
    until, found = time.perf_counter() + seconds, solution
    lack: Counter[str] = Counter()
    for _ in range(_ROUNDS):
        worst: Counter[str] = Counter()
        for (name, _place), size in found.caches.missing.items():
            worst[name] = max(worst[name], size)
        if not worst:
            break
        lack += worst
        found = _with(solution, lack)
    for name in list(lack):
        low = 0
        for _ in range(_HALVINGS):
            if time.perf_counter() > until:
                break
            middle = (low + lack[name]) // 2
            less = _with(solution, {**lack, name: middle})
            if less.caches.missing and solve(less.problem, seconds / 12).caches.missing:
                low = middle
            else:
                lack[name] = middle
    return dict(lack)


def _with(solution: Solution, more: Mapping[str, int]) -> Solution:
    """Return the same options and ranks on machines with so many bytes more."""
    old = solution.problem.topology
    sizes = {FIELDS[name]: getattr(old, FIELDS[name]) + size for name, size in more.items()}
    return moved(solution, replace(old, **sizes))


def what_would_help(solution: Solution, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """Return (changes of the machines by what the step would become, best first; whether planned again).

    Planning again lets tables follow with other options and ranks. Without as many seconds as that takes, the
    options and ranks stay.
    """
    changes, step = improvements(solution.problem.topology), solution.prediction.step
    each = seconds / len(changes)
    again = solution.seconds <= _SLOWER * each
    result = []
    for text, better in changes.items():
        found = [moved(solution, better)]
        if again:  # the search may miss the options that it found before
            found.append(solve(found[0].problem, each))
        after = min((one.prediction.step for one in found if not one.caches.missing), default=step)
        if after < step * 0.999:
            result.append({"change": text, "step_s": after, "step_change": after / step - 1})
    return sorted(result, key=lambda item: item["step_s"]), again


def improvements(topology: Topology) -> dict[str, Topology]:
    """Return better machines, by what is better in words."""
    changes: dict[str, dict[str, Any]] = {}
    for words, (name, share) in _MORE.items():
        size = int(getattr(topology, name))
        more = max(_GIB, size // share // _GIB * _GIB)
        changes[f"+{format_bytes(more)} {words}"] = {name: size + more}
    for words, names in _TWICE.items():
        changes[f"twice the {words}"] = {name: 2 * getattr(topology, name) for name in names}
    return {text: replace(topology, **change) for text, change in changes.items()}
