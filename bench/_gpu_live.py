"""A part of ``tierstore bench gpu``: what moves beside what computes, and hits against the simulator's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from cache_policies import simulate
from tierstore.cuda.streams import Stream
from tierstore.data import Batch
from tierstore.keys import make_keys

from ._gpu_sizes import Figures, Setting
from ._gpu_systems import SYSTEMS, Tables
from ._gpu_training import DEPTH, WINDOW, Stage, ahead_of, read_batches, stages

Spans = list[tuple[float, float]]
_STEPS = 36
_STREAM_AT = {"cuLaunchKernel": 8, "cuMemcpyAsync": 3}  # the argument that is the stream


def shared_time(some: Iterable[tuple[float, float]], other: Iterable[tuple[float, float]]) -> float:
    """Return how long both have work: the length of what the unions of the spans have in common."""
    first, second = _union(some), _union(other)
    common, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        common += max(0.0, end - begin)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


class Timeline:
    """Events around every kernel and copy of a device while it is watched.

    An event before a kernel comes after what the kernel waits for, so its span is work and no wait. What
    computes is a whole step: from its first kernel of ours to the end of the dense layers' update.
    """

    def __init__(self, device: Any) -> None:
        self._driver = driver = device.streams.driver
        self._handles = {device.streams.handle(s): s.name.lower() for s in Stream if s is not Stream.COMPUTE}
        self._plain, self._found = driver.ready, {name: [] for name in (*self._handles.values(), "compute")}
        self._step: Any = None
        self._origin = self._event(None)
        driver.ready = self._ready

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record() if stream is None else event.record(torch.cuda.ExternalStream(stream))
        return event

    def _ready(self, function: str, *args: Any, **more: Any) -> Callable[[], Any]:
        call, handle = self._plain(function, *args, **more), args[_STREAM_AT[function]]
        name = self._handles.get(handle)
        if name is None:
            if self._step is None:
                self._step = self._event(None)
            return call
        return partial(self._timed, name, handle, call)

    def _timed(self, name: str, handle: Any, call: Callable[[], Any]) -> Any:
        begin = self._event(handle)
        result = call()
        self._found[name].append((begin, self._event(handle)))
        return result

    def step_ends(self) -> None:
        """Say that a training step was given to the GPU."""
        if self._step is not None:
            self._found["compute"].append((self._step, self._event(None)))
        self._step = None

    def end(self) -> dict[str, Spans]:
        """Stop watching; return when each stream worked, in milliseconds. The GPU must have ended."""
        del self._driver.ready  # the method of the class
        return {
            name: [(self._origin.elapsed_time(a), self._origin.elapsed_time(b)) for a, b in spans]
            for name, spans in self._found.items()
        }


def live(setting: Setting) -> Figures:
    """Train DLRM with ``uvm``; say what was beside what, and compare hits with the simulator's."""
    batches = read_batches(setting, _STEPS)
    with closing(SYSTEMS["uvm"](setting)) as tables:
        stage = next(stage for stage in stages(tables, setting) if stage.name == "dlrm")
        yield _overlap(stage, batches, tables)
        yield from hits(batches, tables.bags)


def _overlap(stage: Stage, batches: Sequence[Batch], tables: Tables) -> dict[str, Any]:
    """Train on all batches; watch the second half."""
    timeline = None
    for number, batch in enumerate(ahead_of(batches, tables)):
        if number == len(batches) // 2:
            timeline = Timeline(tables.bags.engine.device)
        stage.step(batch)
        if timeline:
            timeline.step_ends()
    torch.cuda.synchronize()
    spans = timeline.end() if timeline else {}
    found: dict[str, Any] = {"watched_steps": len(spans.get("compute", []))}
    for name in ("up", "down", "index"):
        busy = sum(end - begin for begin, end in _union(spans.get(name, [])))
        found[f"{name}.busy_ms"] = busy
        if busy:
            found[f"ratio.{name}_beside_compute"] = shared_time(spans[name], spans["compute"]) / busy
    return found


def hits(batches: Sequence[Batch], bags: Any) -> Figures:
    """Compare what tables that share slots missed with the simulator, and say how many rows these are."""
    (group,) = bags.engine.groups
    plan, counted = group.fast.plan, bags.stats()["tables"]
    names = [config.name for config in bags.embedding_bag_configs()]
    shared = [t for t in range(len(names)) if plan.share_of(t) is None]
    tiers = [counted[names[t]]["tiers"]["hbm"] for t in shared]
    rows, misses = (sum(tier[key] for tier in tiers) for key in ("rows", "row_misses"))
    yield {"hits.rows": rows, "hits.misses": misses, "hits.tables": len(shared), "hits.slots": plan.slots}
    keys = [
        np.concatenate([make_keys(t, batch.sparse[names[t]].values().numpy()) for t in shared])
        for batch in batches
    ]
    expected = simulate(keys, "lookahead", plan.slots, depth=DEPTH, window=WINDOW)
    yield {
        "hits.simulated_rows": expected.uniques,
        "hits.simulated_misses": expected.misses,
        "hits.equal_to_the_simulator": (rows, misses) == (expected.uniques, expected.misses),
    }
