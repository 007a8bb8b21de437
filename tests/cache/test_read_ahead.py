"""Reading ahead: what it gives is what the store has, whatever is written or fails meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _core
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.errors import StoreIOError

ROW = 16
EACH = ROW + math.ceil(_core.HeldRows.BYTES_PER_ROW)
NEVER = np.iinfo(np.int64).max


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
    """``asks``: the tiers are asked what they hold; else what they hold is not announced."""

    def __init__(self, rows: int = 40, asks: bool = True) -> None:
        self.store: Any = Store()
        self.lock = threading.RLock()
        self.resident: set[int] = set()
        resident = self._resident if asks else None
        self.ahead = ReadAhead(self.store, ROW, 2 * rows * EACH, self.lock, resident)

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
            keys[p]: rows[slot, 0]
            for at, rows, slots in pieces
            for p, slot in zip(at.tolist(), slots.tolist(), strict=True)
        }

    def keep(self, version: int, uses: dict[int, int]) -> None:
        """The rows of these keys leave memory in this version; they are used next by these lookups."""
        keys = np.array(list(uses), np.uint64)
        with self.lock:
            self.ahead.rows_overwritten(keys)
            self.store.version.update((key, version) for key in uses)
            rows = np.full((len(uses), ROW), version, np.uint8)
            self.ahead.keep(keys, rows, np.array(list(uses.values())))

    def plan(self, seq: int, *keys: int) -> None:
        """Lookup ``seq`` is planned and takes these rows."""
        with self.lock:
            self.ahead.lookup_begun(seq)
        self.ahead.wait(seq)
        with self.lock:
            self.ahead.lookup_filled(seq, np.array(keys, np.uint64))

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.ahead._thread is not None or self.ahead._reading is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from _rigged(Rig())


@pytest.fixture
def aware() -> Iterator[Rig]:
    yield from _rigged(Rig(asks=False))


def _rigged(rig: Rig) -> Iterator[Rig]:
    yield rig
    rig.store.go.set()
    rig.ahead.close()


def test_many_lookups_are_one_read_without_what_is_in_memory(rig: Rig) -> None:
    rig.resident = {4}
    with rig.lock:
        for seq in range(3):
            rig.announce(seq, 2 * seq, 2 * seq + 1, *([6] if seq == 2 else []))
    rig.store.go.set()
    rig.wait_idle()
    assert rig.store.asked == [[0, 1, 2, 3, 5, 6]]
    assert rig.find(0, 1, 2, 3, 4, 5, 6, 7) == {0: 1, 2: 1, 6: 1}
    assert rig.ahead.memory_bytes() > 0
    rig.plan(2)
    assert rig.find(0, 2, 6) == {}
    assert rig.ahead.memory_bytes() == 0


def test_rows_written_during_or_after_the_read_are_not_given(rig: Rig) -> None:
    rig.announce(0, 2, 4, 6, 8)
    assert rig.store.begun.wait(20)
    with rig.lock:
        rig.ahead.rows_overwritten(np.array([4, 99], np.uint64))
        rig.store.version[4] = 2
    rig.store.go.set()
    rig.wait_idle()
    assert rig.find(2, 4, 6, 8) == {2: 1, 6: 1, 8: 1}
    with rig.lock:
        rig.ahead.rows_overwritten(np.array([8, 7], np.uint64))
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
        rig.ahead.lookup_begun(3)
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
    rig.plan(1)
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
        rig.plan(seq)
    rig.wait_idle()
    assert [asked[0] for asked in rig.store.asked] == sorted(asked[0] for asked in rig.store.asked)


def test_rows_that_come_back_are_kept_until_they_are_taken_or_written(rig: Rig) -> None:
    rig.plan(3)
    rig.keep(2, {2: 4, 4: 6, 6: 3, 8: NEVER})
    assert rig.find(2, 4, 6, 8) == {2: 2, 4: 2}
    assert rig.ahead.memory_bytes() == int(2 * (ROW + _core.HeldRows.BYTES_PER_ROW))
    rig.plan(4, 2, 8)
    assert rig.find(2, 4) == {4: 2}
    rig.keep(3, {4: 6})
    assert rig.find(4) == {4: 3}
    with rig.lock:
        rig.ahead.rows_overwritten(np.array([4], np.uint64))
    assert rig.find(4) == {}
    assert rig.ahead.memory_bytes() == 0
    rig.keep(4, {4: 6})
    with rig.lock:
        rig.ahead.forget()
    assert rig.find(4) == {}


def test_kept_rows_and_those_read_share_the_room(rig: Rig) -> None:
    rig.store.go.set()
    rig.keep(2, {key: 9 for key in range(500, 600, 2)})  # 50 where two fifths of 80 may be kept
    assert rig.find(*range(500, 600, 2)) == {
        key: 2 for key in range(536, 600, 2)
    }  # the last are wanted first
    with rig.lock:
        for seq in range(4):
            rig.announce(seq, *range(100 * seq, 100 * seq + 24, 2))  # 12 rows; a block has room for 24
    _wait_for(lambda: len(rig.store.asked) == 2)
    rig.wait_idle()
    assert [len(asked) for asked in rig.store.asked] == [24, 24]
    assert rig.ahead.memory_bytes() == int(80 * (ROW + _core.HeldRows.BYTES_PER_ROW))
    rig.plan(9, *range(536, 546, 2))
    rig.keep(3, {key: 10 for key in range(600, 700, 2)})
    assert len(rig.find(*range(500, 700, 2))) == 32


def test_nothing_is_kept_where_blocks_have_taken_the_room(rig: Rig) -> None:
    rig.store.go.set()
    rig.announce(0, *range(0, 80, 2))
    rig.announce(1, *range(100, 180, 2))
    rig.wait_idle()
    rig.keep(2, {500: 1})
    assert rig.find(500) == {}
    rig.plan(0)
    rig.keep(2, {500: 1})
    assert rig.find(500) == {500: 2}


def test_rows_that_leave_memory_unkept_before_their_lookup_are_read(aware: Rig) -> None:
    with aware.lock:
        aware.announce(0, 2)
        aware.announce(1)  # all that it asks for is in memory
        aware.announce(2, 4)
        # 50 leave where 32 may be kept, and two that the store has in this version.
        aware.ahead.rows_overwritten(np.arange(500, 600, 2, dtype=np.uint64))
        aware.store.version.update((key, 2) for key in range(500, 600, 2))
        rows, uses = np.full((50, ROW), 2, np.uint8), np.repeat([1, 2], 25)
        aware.ahead.keep(np.arange(500, 600, 2, dtype=np.uint64), rows, uses)
        aware.ahead.rows_evicted(np.array([6, 8], np.uint64), np.array([2, NEVER]))
    aware.store.go.set()
    aware.wait_idle()
    assert aware.store.asked == [[2, 4, 6, *range(500, 536, 2)]]
    assert aware.find(6, 8, 500, 598) == {6: 1, 500: 2, 598: 2}


def test_rows_that_leave_after_their_lookup_was_read_are_left_to_its_plan(aware: Rig) -> None:
    aware.store.go.set()
    aware.announce(3, 2)
    aware.wait_idle()
    with aware.lock:
        aware.ahead.rows_evicted(np.array([4], np.uint64), np.array([3]))
    aware.plan(3, 2, 4)
    aware.announce(4, 6)
    aware.wait_idle()
    assert aware.store.asked == [[2], [6]]


def test_lookups_whose_rows_are_all_in_memory_are_forgotten(aware: Rig) -> None:
    for seq in range(30):
        aware.announce(seq)
        aware.plan(seq - 1)
    assert len(aware.ahead._queue) == 1
    assert not aware.store.asked


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "discard"]), st.sets(st.integers(0, 60)))))
def test_held_rows_are_a_dictionary(steps: list[tuple[str, set[int]]]) -> None:
    held, model = _core.HeldRows(40, ROW), dict[int, int]()
    for what, numbers in steps:
        if what == "add":
            new = [n for n in numbers if n not in model]
            if len(model) + len(new) > 40:
                with pytest.raises(ValueError, match="no room"):
                    held.add(np.array(new, np.uint64))
                continue
            model.update(zip(new, held.add(np.array(new, np.uint64)).tolist(), strict=True))
        elif what == "remove":
            held.remove(np.array([model.pop(n) for n in numbers if n in model], np.int32))
        else:
            held.discard(np.array(list(numbers), np.uint64))
            model = {n: slot for n, slot in model.items() if n not in numbers}
        found = held.find(np.arange(61, dtype=np.uint64)).tolist()
        assert found == [model.get(n, -1) for n in range(61)]
        assert len(held) == len(model) == len(set(model.values()))
        assert all(0 <= slot < 40 for slot in model.values())
