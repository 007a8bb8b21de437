"""Rows outside of any tier: a dictionary by key, also while rows are on their way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore import _core

ROW, CAPACITY, KEYS = 16, 40, 60
KEY_SETS = st.sets(st.integers(0, KEYS - 1), max_size=CAPACITY)


def keys_of(numbers: Any) -> Any:
    return np.array(list(numbers), np.uint64)


class HeldRowsMachine(RuleBasedStateMachine):
    """``here`` and ``coming``: the slots by key. ``reads``: slots that a read may write, as it began them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = _core.HeldRows(CAPACITY, ROW)
        self.here: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self.reads: list[list[int]] = []
        self.content: dict[int, int] = {}  # first byte of each row that is here
        self.out: dict[int, int] = {}  # the slots of rows that were taken, by key

    def taken(self) -> set[int]:
        reads = {slot for read in self.reads for slot in read}
        return set(self.here.values()) | reads | set(self.out.values())

    def forget(self, keys: Any) -> None:
        for key in keys:
            self.here.pop(key, None)
            self.coming.pop(key, None)

    @rule(keys=KEY_SETS, value=st.integers(0, 255))
    def add(self, keys: set[int], value: int) -> None:
        self.forget(keys)
        taken = self.taken()
        if len(taken) + len(keys) > CAPACITY:
            with pytest.raises(ValueError, match="no room"):
                self.held.add(keys_of(keys))
            return
        slots = self.held.add(keys_of(keys)).tolist()
        assert not taken & set(slots)
        assert len(set(slots)) == len(keys)
        self.held.rows[slots] = value
        self.here.update(zip(keys, slots, strict=True))
        self.content.update((key, value) for key in keys)

    @rule(keys=st.lists(st.integers(0, KEYS - 1), max_size=CAPACITY))
    def begin(self, keys: list[int]) -> None:
        """The keys may come twice: the sweep gives a key as often as it was added."""
        taken = self.taken()
        if len(taken) + len(keys) > CAPACITY:
            with pytest.raises(ValueError, match="no room"):
                self.held.begin(keys_of(keys))
            return
        begun, slots = self.held.begin(keys_of(keys))
        new = [key for key in dict.fromkeys(keys) if key not in self.here and key not in self.coming]
        assert begun.tolist() == new
        assert len(slots) == len(set(slots.tolist())) == len(new)
        assert not taken & set(slots.tolist())
        self.coming.update(zip(new, slots.tolist(), strict=True))
        self.reads.append(slots.tolist())

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 99), found=st.lists(st.booleans(), min_size=CAPACITY, max_size=CAPACITY))
    def finish(self, which: int, found: list[bool]) -> None:
        slots = self.reads.pop(which % len(self.reads))
        flags = np.array(found[: len(slots)], bool)
        self.held.rows[slots] = 7  # also of rows that were forgotten meanwhile: nobody else may have the slot
        self.held.finish(np.array(slots, np.int32), flags)
        for slot, there in zip(slots, flags.tolist(), strict=True):
            for key in [key for key, at in self.coming.items() if at == slot]:
                del self.coming[key]
                if there:
                    self.here[key], self.content[key] = slot, 7

    @rule(keys=st.sets(st.integers(0, KEYS + 5)))
    def discard(self, keys: set[int]) -> None:
        self.held.discard(keys_of(keys))
        self.forget(keys)

    @rule(keys=KEY_SETS, gone=KEY_SETS, added=KEY_SETS, leaves=st.booleans())
    def take(self, keys: set[int], gone: set[int], added: set[int], leaves: bool) -> None:
        """Rows of any keys may come and go, and be read, until what was taken is let go: its slots are
        nobody else's. If it is not let go, the next take does that."""
        slots = self.held.take(keys_of(keys)).tolist()
        assert slots == [self.here.get(key, -1) for key in keys]
        self.out = {key: slot for key, slot in zip(keys, slots, strict=True) if slot >= 0}
        content = {key: self.content[key] for key in self.out}
        self.forget(keys)
        self.is_the_dictionary()
        self.discard(gone)
        self.add(added, 9)
        self.begin(sorted(gone))
        for key, slot in self.out.items():
            assert (self.held.rows[slot] == content[key]).all()
        if leaves:
            assert (self.held.take(keys_of([])) == []).all()
        else:
            self.held.release()
        self.out = {}

    @invariant()
    def is_the_dictionary(self) -> None:
        assert self.held.find(np.arange(KEYS, dtype=np.uint64)).tolist() == [
            self.here.get(key, -1) for key in range(KEYS)
        ]
        for key, slot in self.here.items():
            assert (self.held.rows[slot] == self.content[key]).all()
        taken = self.taken()
        assert len(self.held) == len(taken) == CAPACITY - self.held.room
        assert all(0 <= slot < CAPACITY for slot in taken)


TestHeldRowsMachine = HeldRowsMachine.TestCase
TestHeldRowsMachine.settings = settings(deadline=None, max_examples=60)


def test_more_keys_than_the_index_begins_with() -> None:
    n = 3 << 16
    held, keys = _core.HeldRows(n, 8), np.arange(n, dtype=np.uint64) * np.uint64(977)
    begun, slots = held.begin(keys)
    assert np.array_equal(begun, keys)
    held.finish(slots, np.ones(n, bool))
    assert np.array_equal(held.find(keys), slots)
    held.discard(keys[::2].copy())
    assert (held.find(keys)[::2] == -1).all()
    assert np.array_equal(held.find(keys)[1::2], slots[1::2])
    assert held.room == n // 2
    assert held.rows.shape == (n, 8)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 64, 65])
def test_take_at_the_bounds_of_its_blocks(n: int) -> None:
    """Rows leave the index while later keys of the block are already being fetched (32 of them)."""
    held, keys = _core.HeldRows(2 * 65, 8), np.arange(2 * 65, dtype=np.uint64) * np.uint64(977)
    slots = held.add(keys)
    assert np.array_equal(held.take(keys[:n]), slots[:n])
    assert np.array_equal(held.find(keys), [*n * [-1], *slots[n:]])
    assert held.room == 0
    held.release()
    assert held.room == n
    assert np.array_equal(held.take(keys), [*n * [-1], *slots[n:]])


@pytest.mark.parametrize(("capacity", "row_bytes"), [(0, 8), (8, 0), (-1, 8)])
def test_nothing_to_hold(capacity: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        _core.HeldRows(capacity, row_bytes)
