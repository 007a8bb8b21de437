"""Training of several systems in turns, on tables whose every row is written: for ``bench steady``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

import tierstore
from tierstore.data import Batch

from ._systems import System
from ._threads import ThreadSeconds

_ROWS_AT_ONCE = 1 << 16
_OF_STORE = ("read_requests", "read_bytes", "written_rows", "written_bytes")


@dataclass
class Turn:
    """What some steps of one system took."""

    steps: int
    examples: int
    seconds: float
    cpu: dict[str, tuple[float, float]]
    """User and system seconds by name of thread."""
    counted: dict[str, float] = field(default_factory=dict)
    """What the counters of a tiered system have gained."""

    @property
    def examples_per_s(self) -> float:
        return self.examples / self.seconds

    @property
    def cpu_seconds(self) -> float:
        return sum(user + system for user, system in self.cpu.values())


class Trainee:
    """A system in training on ``batches``. Each turn goes on where the last turn has ended.

    A tiered system has one prefetch for all its turns, as a training has.
    """

    def __init__(self, name: str, system: System, batches: Sequence[Batch], ahead: bool) -> None:
        self.name = name
        self.system = system
        self.ahead = ahead
        self.turns: list[Turn] = []
        self._batches: Iterator[Batch] = iter(
            tierstore.prefetch(batches, system.model) if ahead else batches  # type: ignore[arg-type]
        )

    @property
    def steps(self) -> int:
        """Return how many batches were trained on so far."""
        return len(self.system.losses)

    def train(self, steps: int) -> Turn:
        """Train on the next ``steps`` batches, or on the batches that are left."""
        before, threads, first = self._counters(), ThreadSeconds(), self.steps
        start = time.perf_counter()
        examples = self.system.steps(islice(self._batches, steps))
        seconds = time.perf_counter() - start
        cpu, after = threads.since(), self._counters()
        gained = {name: after[name] - before[name] for name in after}
        return Turn(self.steps - first, examples, seconds, cpu, gained)

    def _counters(self) -> dict[str, float]:
        if not self.ahead:
            return {}
        stats: Any = self.system.embeddings.stats()  # type: ignore[operator]
        found = {name: float(stats["store"][name]) for name in _OF_STORE}
        hbm = stats["tiers"]["hbm"]
        found["misses"] = float(hbm["rows"] - hbm["row_hits"])
        found["new_rows"] = float(stats["initialised_rows"])
        found["stall_seconds"] = stats["stall_seconds"]
        return found

    def close(self) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        self.system.close()


def touch_all(system: System) -> None:
    """Write every row of the system's tables as it is, and commit where there is a store."""
    bags: Any = system.embeddings
    for table in bags.embedding_bag_configs():
        for first in range(0, table.num_embeddings, _ROWS_AT_ONCE):
            ids = torch.arange(first, min(first + _ROWS_AT_ONCE, table.num_embeddings))
            bags.load_rows(ids, bags.rows(ids, table.name), table=table.name)
    if bags.engine.store is not None:
        bags.commit()


def warm_up(trainee: Trainee, steps: int, most: int, tolerance: float) -> bool:
    """Train until a step's misses and requests change by at most ``tolerance`` (a share) from one turn of
    ``steps`` to the next. Return whether it came to that within ``most`` steps."""
    last = {"misses": 0.0, "read_requests": 0.0}
    for done in range(steps, most + 1, steps):
        turn = trainee.train(steps)
        now = {name: turn.counted[name] / steps for name in last}
        shown = ", ".join(f"{value:,.0f} {name.replace('_', ' ')}" for name, value in now.items())
        say(f"{trainee.name}: {done} steps of warm-up, {shown} per step")
        if all(abs(now[name] - last[name]) <= tolerance * max(now[name], 1) for name in now):
            return True
        last = now
    return False


def take_turns(trainees: Sequence[Trainee], rounds: int, run_in: int, steps: int) -> None:
    """Add ``rounds`` turns of ``steps`` to each trainee. ``run_in`` steps before each turn do not count:
    meanwhile the rows that were read ahead while others trained are used up. The order turns."""
    for number in range(rounds):
        first = number % len(trainees)
        for trainee in [*trainees[first:], *trainees[:first]]:
            trainee.train(run_in)
            trainee.turns.append(trainee.train(steps))
        shown = ", ".join(f"{trainee.name} {trainee.turns[-1].examples_per_s:,.0f}" for trainee in trainees)
        say(f"round {number + 1}: examples/s: {shown}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
