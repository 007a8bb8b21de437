"""The threads of a prefetch stay off the processor of the training thread while that thread need not wait."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tierstore
from tests.bags import SGD, budget, build, random_batches
from tierstore import TierConfig, _core
from tierstore.pipeline import processors
from tierstore.pipeline.processors import Apart, processor_of

PERIOD, FEW, LONGEST = processors._PERIOD, processors._FEW, processors._LONGEST_PAUSE
TRAINING, AHEAD, READING = 100, 101, 102


class Machine:
    """A clock, and processors on which threads run, that Apart takes for the system's."""

    def __init__(self, processors: int) -> None:
        self.now, self.stalled, self.where = 0.0, 0.0, 0
        self.allowed = {TRAINING: set(range(processors))}
        self.calls = 0
        self.computing = torch.get_num_threads()
        self.gone: set[int] = set()
        self.apart = Apart(TRAINING, lambda: self.stalled)

    def get(self, thread: int) -> set[int]:
        if thread in self.gone:
            raise ProcessLookupError
        return set(self.allowed[thread])

    def set(self, thread: int, allowed: set[int]) -> None:
        self.calls += 1
        if thread in self.gone:
            raise ProcessLookupError
        self.allowed[thread] = set(allowed)

    def train(self, seconds: float, stall: float = 0.0, always: bool = False) -> list[set[int]]:
        """Train in steps of 1/64 s, ``stall`` of each in waits where the worker is apart, or always. Return
        where the worker might run in each."""
        seen = []
        for _ in range(int(64 * seconds)):
            self.apart.look([AHEAD, READING], self.computing)
            seen.append(self.allowed.get(AHEAD, self.allowed[TRAINING]))
            assert self.allowed.get(READING, self.allowed[TRAINING]) == seen[-1] or READING in self.gone
            self.now += 1 / 64
            self.stalled += stall / 64 if always or seen[-1] != self.allowed[TRAINING] else 0
        return seen


def in_other_thread(function: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(getattr(request, "param", 2))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", made.get, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", made.set, raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(processors, "processor_of", lambda thread: made.where)
    every = _core.num_threads()
    tierstore.set_num_threads(8)
    yield made
    _core.limit_threads(0)
    tierstore.set_num_threads(every)
    monkeypatch.undo()


@pytest.mark.parametrize("machine", [2, 3, FEW], indirect=True)
def test_threads_stay_off_the_processor_of_the_training_thread(machine: Machine) -> None:
    everywhere = machine.get(TRAINING)
    assert set(map(frozenset, machine.train(PERIOD))) == {frozenset(everywhere)}
    calls = machine.calls
    assert machine.train(2) == 128 * [everywhere - {0}]
    assert machine.calls == calls + 2, "threads that stay where they are need no calls"
    machine.where = 1
    assert machine.train(1 + PERIOD)[-64:] == 64 * [everywhere - {1}]
    assert machine.get(TRAINING) == everywhere


def test_a_training_thread_that_waits_leaves_its_processor_to_the_threads_that_it_waits_for(
    machine: Machine,
) -> None:
    """Pauses double while it would wait again, up to the longest one, and begin short again."""
    seen = machine.train(4 * LONGEST, stall=0.2)
    together = [number for number, where in enumerate(seen) if where == {0, 1}]
    assert len(together) > 0.9 * len(seen)
    begun = [number for number in together if seen[number - 1] != {0, 1}]
    lengths = [next(n for n in range(len(seen)) if [*seen, {1}][at + n] == {1}) / 64 for at in begun]
    assert lengths[:4] == [PERIOD, 2 * PERIOD, 4 * PERIOD, 8 * PERIOD]
    assert max(lengths) == LONGEST
    machine.train(LONGEST)
    assert machine.train(10) == 640 * [{1}]


def test_a_training_thread_that_always_waits_never_gives_up_a_processor(machine: Machine) -> None:
    """It would wait longer: plans are what takes the time. Else a prefetch that is over soon would plan with
    fewer threads for most of its time."""
    assert machine.train(LONGEST, stall=0.2, always=True) == int(64 * LONGEST) * [{0, 1}]
    assert _core.num_threads() == 8
    assert machine.train(2)[-64:] == 64 * [{1}]


@pytest.mark.parametrize(
    ("machine", "computing", "left"),
    [(2, 1, 1), (2, 2, 1), (3, 1, 2), (FEW, 1, 3), (FEW, 9, 1)],
    indirect=["machine"],
)
def test_plans_use_as_many_threads_as_computing_leaves_processors(
    machine: Machine, computing: int, left: int
) -> None:
    """And all threads for a while when the training thread has waited for plans; other threads do always."""
    machine.computing = computing
    everywhere = machine.get(TRAINING)
    machine.train(1)
    assert _core.num_threads() == left
    assert in_other_thread(_core.num_threads) == 8
    seen = set()
    for _ in range(640):
        machine.train(1 / 64, stall=0.2)
        seen.add((machine.get(AHEAD) == everywhere, _core.num_threads()))
    assert seen == {(True, 8), (False, left)}


@pytest.mark.parametrize("machine", [1, FEW + 1], indirect=True)
def test_plans_use_all_threads_where_processors_are_many(machine: Machine) -> None:
    machine.train(2)
    assert _core.num_threads() == 8


def test_short_waits_change_nothing(machine: Machine) -> None:
    machine.train(PERIOD)
    assert machine.train(20, stall=0.9 * processors._WAITED, always=True) == 20 * 64 * [{1}]


@pytest.mark.parametrize("machine", [1, FEW + 1, 64], indirect=True)
def test_one_processor_and_many_are_left_as_they_are(machine: Machine) -> None:
    machine.train(2)
    assert not machine.calls


def test_processors_that_a_user_has_taken_away_are_not_given_back(machine: Machine) -> None:
    machine.train(1)
    machine.allowed[TRAINING] = {0}
    machine.train(1)
    assert machine.get(AHEAD) == {1}
    machine.allowed[TRAINING] = {0, 3}
    assert machine.train(2)[-1] == {3}


def test_threads_that_have_ended(machine: Machine) -> None:
    machine.gone = {READING}
    assert machine.train(1)[-1] == {1}
    machine.gone = {TRAINING, READING}
    calls = machine.calls
    machine.train(1)
    assert machine.calls == calls


def test_elsewhere_nothing_happens(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    machine.train(2)
    assert not machine.calls


@pytest.mark.skipif(sys.platform != "linux", reason="threads have processors of their own on Linux")
def test_the_processor_of_a_thread() -> None:
    own = threading.get_native_id()
    before = os.sched_getaffinity(own)
    try:
        for processor in before:
            os.sched_setaffinity(own, {processor})
            assert processor_of(own) == processor
    finally:
        os.sched_setaffinity(own, before)
    with pytest.raises(OSError):
        processor_of(2**22 + 1)


def test_a_prefetch_leaves_a_processor_to_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads do, those of the kernels and the training thread do not. Where there is one processor, all
    threads share it."""
    own = threading.get_native_id()
    everywhere = os.sched_getaffinity(own)
    working_ahead = {"tierstore-prefetch", "tierstore-read-ahead"}
    monkeypatch.setattr(processors, "_FEW", len(everywhere))
    monkeypatch.setattr(processors, "_WAITED", 2.0)  # whatever else runs on the machine
    monkeypatch.setattr(processors, "_PERIOD", 0.0)
    seen: dict[str, set[int]] = {}
    config = TierConfig(hbm=budget(60, dim=8), engine="native", path=tmp_path, read_ahead="1MiB")
    with build(config, SGD, (8,)) as module:
        batches = random_batches(1, 20, 1, 40, 2)
        for batch in tierstore.prefetch(batches, module, inputs={"": lambda batch: (batch,)}, window=4):
            module(batch).sum().backward()
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            for task in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):  # a thread may have ended since it was listed
                    seen[names.get(int(task.name), "native")] = os.sched_getaffinity(int(task.name))
    apart = {name for name, where in seen.items() if len(where) == len(everywhere) - 1}
    assert working_ahead <= seen.keys()
    assert apart == (working_ahead if len(everywhere) > 1 else set())
    assert all(where == everywhere for name, where in seen.items() if name not in apart)
