"""Training of several systems in turns, on tables whose every row is written: for ``bench steady``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean
from typing import Any

import torch

import tierstore
from tierstore.data import Batch

from ._checks import use_threads
from ._systems import System
from ._threads import ThreadSeconds

_ROWS_AT_ONCE = 1 << 16
_STEADY = {"misses": "misses", "read_requests": "requests", "written_bytes": "bytes written"}
"""Counters that tell whether training is steady, and what they are called."""
_AVERAGED = 2
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

    A tiered system has one prefetch for all its turns, as a training has. torch and tierstore compute with
    ``threads`` threads while the system trains.
    """

    def __init__(
        self, name: str, system: System, batches: Sequence[Batch], ahead: bool, threads: int
    ) -> None:
        self.name = name
        self.threads = threads
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
        use_threads(self.threads)
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
    """Train turns of ``steps`` until what a step misses, requests and writes is steady, on average of two
    turns: it has changed by at most ``tolerance`` (a share) from the two turns before. Return whether it came
    to that within ``most`` steps.

    What is written says when the store has begun to compact, and then what its compaction takes: reads and
    writes are different from then on.
    """
    turns: list[Turn] = []
    for done in range(steps, most + 1, steps):
        turns.append(trainee.train(steps))
        shown = ", ".join(f"{turns[-1].counted[name] / steps:,.0f} {said}" for name, said in _STEADY.items())
        say(f"{trainee.name}: {done} steps of warm-up, {shown} per step")
        last = turns[-2 * _AVERAGED :]
        if len(last) == 2 * _AVERAGED and all(_is_steady(last, name, tolerance) for name in _STEADY):
            return True
    return False


def _is_steady(turns: Sequence[Turn], name: str, tolerance: float) -> bool:
    """Return whether a counter's average of the first half of the turns is about that of the second half."""
    counts = [turn.counted[name] / turn.steps for turn in turns]
    before, now = mean(counts[:_AVERAGED]), mean(counts[_AVERAGED:])
    return abs(now - before) <= tolerance * max(now, 1)


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
