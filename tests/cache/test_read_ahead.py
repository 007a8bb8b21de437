"""Reading ahead: what it gives is what the store has, whatever is written or fails meanwhile."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.bags import SGD, budget, build, everything, random_batches
from tierstore import TierConfig
from tierstore.cache.read_ahead import ReadAhead
from tierstore.errors import StoreIOError
from tierstore.pipeline.prefetch import prefetch

ROW = 16


class Store:
    """Rows that all hold their version; a read takes until ``go`` is set."""

    def __init__(self) -> None:
        self.version: dict[int, int] = {key: 1 for key in range(0, 1000, 2)}
        self.asked: list[list[int]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.error: StoreIOError | None = None

    def read(self, keys: Any, out: Any) -> Any:
        self.asked.append(keys.tolist())
        found = np.array([int(key) in self.version for key in keys])
        for row, key in enumerate(keys.tolist()):
            out[row] = self.version.get(key, 0)
        self.begun.set()
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        return found


class Rig:
    def __init__(self, rows: int = 40) -> None:
        self.store: Any = Store()
        self.lock = threading.RLock()
        self.resident: set[int] = set()
        self.ahead = ReadAhead(self.store, ROW, 2 * rows * ROW, self.lock, self._resident)

    def _resident(self, keys: Any) -> Any:
        return np.array([int(key) in self.resident for key in keys], bool)

    def announce(self, seq: int, *keys: int) -> None:
        with self.lock:
            self.ahead.announce(seq, np.array(keys, np.uint64))

    def find(self, *keys: int) -> dict[int, int]:
        """Versions by key of those that are to be had."""
        with self.lock:
            pieces = self.ahead.find(np.array(keys, np.uint64))
        return {
            keys[p]: int(rows[s, 0]) for at, rows, source in pieces for p, s in zip(at, source, strict=True)
        }

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.ahead._thread is not None or self.ahead._reading is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.store.go.set()
    rig.ahead.close()


def test_many_lookups_are_one_read_without_what_is_in_memory(rig: Rig) -> None:
    rig.resident = {4}
    with rig.lock:
        for seq in range(3):
            rig.announce(seq, 2 * seq, 2 * seq + 1, 2 * seq + 2)
    rig.store.go.set()
    rig.wait_idle()
    assert rig.store.asked == [[0, 1, 2, 3, 5, 6]]
    assert rig.find(0, 1, 2, 3, 4, 5, 6, 7) == {0: 1, 2: 1, 6: 1}
    assert rig.ahead.memory_bytes() > 0
    with rig.lock:
        rig.ahead.planned(2)
    assert rig.find(0, 2, 6) == {}
    assert rig.ahead.memory_bytes() == 0


def test_rows_written_during_or_after_the_read_are_not_given(rig: Rig) -> None:
    rig.announce(0, 2, 4, 6, 8)
    assert rig.store.begun.wait(20)
    with rig.lock:
        rig.ahead.written(np.array([4, 99], np.uint64))
        rig.store.version[4] = 2
    rig.store.go.set()
    rig.wait_idle()
    assert rig.find(2, 4, 6, 8) == {2: 1, 6: 1, 8: 1}
    with rig.lock:
        rig.ahead.written(np.array([8, 7], np.uint64))
    assert rig.find(2, 4, 6, 8) == {2: 1, 6: 1}


def test_a_plan_waits_for_the_read_that_has_its_rows(rig: Rig) -> None:
    rig.announce(5, 2)
    assert rig.store.begun.wait(20)
    rig.ahead.wait(4)  # nothing is being read for it
    waiting = threading.Thread(target=rig.ahead.wait, args=(5,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    rig.store.go.set()
    waiting.join(20)
    assert not waiting.is_alive()
    assert rig.find(2) == {2: 1}


def test_lookups_that_are_planned_or_too_large_are_not_read(rig: Rig) -> None:
    with rig.lock:
        rig.ahead.planned(3)
        rig.announce(3, 2)
        rig.announce(4, *range(0, 200, 2))
        rig.announce(5, 4)
    rig.store.go.set()
    rig.wait_idle()
    assert rig.store.asked == [[4]]


def test_only_what_a_lookup_lacks_has_to_fit(rig: Rig) -> None:
    rig.store.go.set()
    rig.resident = set(range(0, 196, 2))
    rig.announce(0, *range(0, 200, 2))
    rig.wait_idle()
    assert rig.store.asked == [[196, 198]]


def test_the_next_read_begins_when_it_covers_as_many_lookups_as_the_block_before_it(rig: Rig) -> None:
    rig.store.go.set()
    with rig.lock:
        for seq in range(4):
            rig.announce(seq, 2 * seq)
    _wait_for(lambda: rig.store.asked == [[0, 2, 4, 6]])
    rig.announce(4, 8)
    time.sleep(0.02)
    with rig.lock:
        rig.ahead.planned(1)
    time.sleep(0.02)
    assert len(rig.store.asked) == 1
    rig.announce(5, 10)
    _wait_for(lambda: rig.store.asked[1:] == [[8, 10]])


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_is_read_when_the_window_is_forgotten_is_dropped(rig: Rig) -> None:
    rig.announce(0, 2)
    assert rig.store.begun.wait(20)
    with rig.lock:
        rig.ahead.forget()
    rig.store.go.set()
    rig.wait_idle()
    assert rig.find(2) == {}
    rig.announce(1, 4)
    rig.wait_idle()
    assert rig.find(4) == {4: 1}


def test_a_read_that_fails_is_left_to_the_plan(rig: Rig) -> None:
    rig.store.error = StoreIOError("the disk is gone")
    rig.store.go.set()
    rig.announce(0, 2)
    rig.wait_idle()
    assert rig.find(2) == {}


def test_at_most_two_reads_are_held(rig: Rig) -> None:
    rig.store.go.set()
    with rig.lock:
        for seq in range(6):
            rig.announce(seq, *range(100 * seq, 100 * seq + 60, 2))  # 30 rows; a block has room for 40
    deadline = time.monotonic() + 20
    while len(rig.store.asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(rig.store.asked) == 2
    for seq in range(6):
        rig.ahead.wait(seq)
        with rig.lock:
            rig.ahead.planned(seq)
    rig.wait_idle()
    assert [asked[0] for asked in rig.store.asked] == sorted(asked[0] for asked in rig.store.asked)


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_training_takes_rows_that_were_read_ahead(policy: str) -> None:
    batches = random_batches(3, 60, 1, 6, 3)
    size = budget(60, policy=policy)
    modules = [build(config, SGD, (8,)) for config in (TierConfig(hbm="all"), tiered(size, policy))]
    inputs = {"": lambda batch: (batch,)}
    for module in modules:
        for ids in prefetch(iter(batches), module, inputs=inputs, depth=1, window=12):
            module(ids).sin().sum().backward()
    want, got = (everything(module) for module in modules)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    stats = modules[1].engine.stats()
    assert stats["read_ahead_rows"] > stats["tiers"]["ssd"]["row_hits"] // 3 > 0
    for module in modules:
        module.engine.close()


def tiered(size: int, policy: str) -> TierConfig:
    return TierConfig(hbm=size, engine="memory", policy=policy)


def test_tables_that_nobody_holds_are_freed() -> None:
    module = build(tiered(budget(60), "lookahead"), SGD, (8,))
    for ids in prefetch(
        random_batches(3, 30, 1, 6, 3), module, inputs={"": lambda b: (b,)}, depth=1, window=8
    ):
        module(ids).sin().sum().backward()
    chain = weakref.ref(module.engine.chains[0])
    module.engine.close()
    del module, ids
    gc.collect()
    assert chain() is None
