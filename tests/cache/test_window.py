"""The native window against a dictionary: keys first seen, next uses, forgetting."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _core

_NEVER = np.iinfo(np.int64).max


class _Oracle:
    def __init__(self) -> None:
        self.pending: deque[tuple[int, list[int]]] = deque()

    def announce(self, seq: int, keys: list[int]) -> list[int]:
        known = {key for _, other in self.pending for key in other}
        self.pending.append((seq, keys))
        return [key for key in keys if key not in known]

    def take(self) -> tuple[int, list[int]]:
        seq, keys = self.pending.popleft()
        return seq, [next((s for s, other in self.pending if key in other), _NEVER) for key in keys]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_window_equals_a_dictionary(data: st.DataObject) -> None:
    """Few keys, so that many are seen again after all lookups with them have left."""
    window, oracle, seq = _core.Window(), _Oracle(), 0
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["announce", "announce", "take", "clear"]))
        if step == "announce":
            keys = data.draw(st.lists(st.integers(0, 40), unique=True, max_size=20))
            seq += data.draw(st.integers(1, 3))
            batch = _core.batch_of_unique(np.array(keys, np.uint64))
            assert window.announce(seq, batch).tolist() == oracle.announce(seq, keys)
        elif step == "take" and oracle.pending:
            taken, next_use = oracle.take()
            assert window.take(taken).tolist() == next_use
        elif step == "clear" and data.draw(st.integers(0, 4)) == 0:
            assert sorted(window.clear().tolist()) == sorted({k for _, o in oracle.pending for k in o})
            oracle.pending.clear()
        assert window.lookups == len(oracle.pending)
        assert window.distinct_rows == len({key for _, other in oracle.pending for key in other})


def test_window_of_many_batches_is_rebuilt_again_and_again() -> None:
    """Entries of lookups that have left are used again or dropped: the window does not grow."""
    window, oracle, random = _core.Window(), _Oracle(), np.random.default_rng(0)
    bytes_ = []
    for seq in range(300):
        keys = random.choice(20_000, 700, replace=False).tolist()
        batch = _core.batch_of_unique(np.array(keys, np.uint64))
        assert window.announce(seq, batch).tolist() == oracle.announce(seq, keys)
        if seq >= 4:
            taken, next_use = oracle.take()
            assert window.take(taken).tolist() == next_use
            bytes_.append(window.memory_bytes)
    assert bytes_[-1] == bytes_[50]


@pytest.mark.parametrize("large", [(1 << 14) - 1, 1 << 14, (1 << 14) + 1, 70_001])
def test_threads_share_large_lookups(large: int) -> None:
    """One window sees the lookups with one thread, the other one with changing numbers of threads."""
    one, shared, random = _core.Window(), _core.Window(), np.random.default_rng(large)
    threads = _core.num_threads()
    try:
        for seq in range(40):
            size = large if seq % 3 else 50
            keys = random.choice(100_000, size, replace=False).astype(np.uint64)
            _core.set_num_threads(1)
            first = one.announce(seq, _core.batch_of_unique(keys))
            _core.set_num_threads([1, 2, 5][seq // 5 % 3])
            assert shared.announce(seq, _core.batch_of_unique(keys)).tolist() == first.tolist()
            assert shared.distinct_rows == one.distinct_rows
            if seq >= 7:
                assert shared.take(seq - 7).tolist() == one.take(seq - 7).tolist()
            if seq == 25:
                assert shared.clear().tolist() == one.clear().tolist()
                assert one.lookups == 0
                break
        assert shared.announce(99, _core.batch_of_unique(keys)).tolist() == keys.tolist()
    finally:
        _core.set_num_threads(threads)


def test_window_wants_its_lookups_in_order() -> None:
    window, batch = _core.Window(), _core.batch_of_unique(np.array([1], np.uint64))
    window.announce(3, batch)
    with pytest.raises(RuntimeError, match="increase"):
        window.announce(3, batch)
    with pytest.raises(RuntimeError, match="order"):
        window.take(2)


def test_a_tier_tells_which_announced_keys_it_lacks() -> None:
    tier = _core.Tier(lanes=[[_core.ShareConfig(slots=8)]], grows=True)
    keys = np.array([5, 3, 9], np.uint64)
    plan = tier.begin(keys, None, 0, absent=True)
    assert plan.absent.tolist() == [0, 1, 2]
    tier.assign(keys, False, plan)
    assert tier.announce(np.array([9, 4, 5, 7], np.uint64), 6, 0).tolist() == [4, 7]
    again = tier.begin(keys, None, 1)
    assert again.slots.tolist() == plan.slots.tolist()
    assert not len(again.absent)
