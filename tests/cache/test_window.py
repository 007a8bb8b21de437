"""The native window against a dictionary: keys first seen, next uses, forgetting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _core
from tierstore.keys import make_keys

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
        later = [(s, set(other)) for s, other in self.pending]
        return seq, [next((s for s, other in later if key in other), _NEVER) for key in keys]


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


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = _core.num_threads()
    yield _core.set_num_threads
    _core.set_num_threads(before)


@pytest.mark.parametrize("spread", [1, 1000])
@pytest.mark.parametrize("large", [(1 << 14) - 1, 1 << 14, (1 << 14) + 1, 70_001])
def test_threads_share_large_lookups(large: int, spread: int, threads: Callable[[int], None]) -> None:
    """One window sees the lookups with one thread, the other one with changing numbers of threads. Ids that
    are close to each other have entries by id, and others have none."""
    one, shared, random = _core.Window(), _core.Window(), np.random.default_rng(large)
    for seq in range(40):
        size = large if seq % 3 else 50
        keys = random.choice(100_000, size, replace=False).astype(np.uint64) * np.uint64(spread)
        threads(1)
        first = one.announce(seq, _core.batch_of_unique(keys))
        threads([1, 2, 5][seq // 5 % 3])
        assert shared.announce(seq, _core.batch_of_unique(keys)).tolist() == first.tolist()
        assert shared.distinct_rows == one.distinct_rows
        if seq >= 7:
            assert shared.take(seq - 7).tolist() == one.take(seq - 7).tolist()
        if seq == 25:
            assert shared.clear().tolist() == one.clear().tolist()
            assert one.lookups == 0
            break
    assert shared.announce(99, _core.batch_of_unique(keys)).tolist() == keys.tolist()


def _lookup(random: np.random.Generator, size: int) -> np.ndarray:
    """Unique keys: of table 1 close to each other, of table 3 also beyond those of the first lookup, of table
    2 far from each other."""
    parts = [
        make_keys(1, random.choice(30_000, size // 2, replace=False)),
        make_keys(2, random.choice(4_000, size // 8, replace=False) * (1 << 30)),
        make_keys(3, random.choice(9_000 + 40 * size, size // 4, replace=False)),
    ]
    return np.concatenate([parts[number] for number in random.permutation(3)])


@pytest.mark.parametrize("first", [100, (1 << 14) + 1000])
def test_large_lookups_equal_a_dictionary(first: int, threads: Callable[[int], None]) -> None:
    """Tables have entries by id where the first lookup is large, and no entries by id again once the window
    is cleared."""
    window, oracle, random = _core.Window(), _Oracle(), np.random.default_rng(first)
    for seq in range(24):
        threads([2, 1, 3][seq % 3])
        size = first if seq in (0, 14) else int(random.choice([40, 3000, 20_000]))
        keys = _lookup(random, size)
        batch = _core.batch_of_unique(keys)
        assert window.announce(seq, batch).tolist() == oracle.announce(seq, keys.tolist())
        assert window.distinct_rows == len({key for _, other in oracle.pending for key in other})
        if len(oracle.pending) > int(random.integers(1, 7)):
            taken, next_use = oracle.take()
            assert window.take(taken).tolist() == next_use
        if seq == 13:
            announced = {key for _, other in oracle.pending for key in other}
            assert window.clear().tolist() == sorted(announced)
            oracle.pending.clear()
    assert oracle.pending


@pytest.mark.parametrize("count", [(1 << 14) - 1, 1 << 14, 60_000])
@pytest.mark.parametrize(
    "bits", [range(15, 31), range(64), [*range(8), *range(40, 64)], [*range(0, 60, 3)], range(48, 64)]
)
def test_keys_whose_use_will_not_come_are_in_increasing_order(
    bits: Sequence[int], count: int, threads: Callable[[int], None]
) -> None:
    """Whatever bits the keys differ in, and whichever lookups use the keys last."""
    random, numbers = np.random.default_rng(count), np.arange(1 << min(len(bits), 16), dtype=np.uint64)
    keys = np.full(len(numbers), 0x5A5A5A5A5A5A5A5A & ~sum(1 << bit for bit in bits), np.uint64)
    for place, bit in enumerate(random.permutation(bits).tolist()):
        keys |= (numbers >> np.uint64(place % 16) & np.uint64(1)) << np.uint64(bit)
    keys = random.permutation(keys)[:count]
    for shared in (1, 3):
        threads(shared)
        window = _core.Window()
        for seq, part in enumerate((keys[: count // 2], keys, keys[100:2000])):
            window.announce(seq, _core.batch_of_unique(random.permutation(part)))
        window.take(0)
        assert window.clear().tolist() == np.sort(keys).tolist()
        assert (window.lookups, window.distinct_rows) == (0, 0)
        assert window.clear().tolist() == []


def test_the_bytes_of_a_window_are_those_of_its_lookups_and_its_index() -> None:
    window, of_row = _core.Window(), 8 + 4 + 4
    batches = [_core.batch_of_unique(np.arange(rows, dtype=np.uint64)) for rows in (30, 10, 20)]
    assert window.memory_bytes == 0
    index = []
    for seq, batch in enumerate(batches):
        window.announce(seq, batch)
        index.append(window.memory_bytes - of_row * sum(len(one.unique) for one in batches[: seq + 1]))
    assert index == [64 * 17 // 16 * 16] * 3
    window.take(0)
    assert window.memory_bytes == index[0] + of_row * 30
    window.clear()
    assert window.memory_bytes == index[0]
    window = _core.Window(knows_uses=False)
    window.announce(0, batches[0])
    assert window.memory_bytes == of_row * 30
    window.take(0)
    assert window.memory_bytes == 0


@pytest.mark.parametrize("rows", [1 << 14, 1 << 16])
@pytest.mark.parametrize("past", [-8, 0, 8])
def test_entries_by_id_are_no_larger_than_what_a_window_has_use_for(rows: int, past: int) -> None:
    """Sixteen ids per row of a lookup at most, and 2^19 ids in all."""
    window, limit = _core.Window(), min(16 * rows, 1 << 19)
    ids = np.arange(rows, dtype=np.uint64)
    ids[-1] = limit + past - 1
    window.announce(0, _core.batch_of_unique(ids))
    by_id = window.memory_bytes - rows * (8 + 4 + 4)
    if past > 0:
        assert by_id >= rows * 16
    else:
        assert by_id - 8 * (limit + past) <= 16 * 64 * 17  # shards without a key
    assert window.announce(1, _core.batch_of_unique(ids)).tolist() == []
    assert window.take(0).tolist() == [1] * rows
    assert window.clear().tolist() == ids.tolist()
    assert window.announce(2, _core.batch_of_unique(ids[:9])).tolist() == ids[:9].tolist()


def test_a_window_that_knows_no_uses_has_its_lookups_alone() -> None:
    window, batch = _core.Window(knows_uses=False), _core.batch_of_unique(np.arange(40, dtype=np.uint64))
    assert window.announce(3, batch).tolist() == []
    assert window.announce(5, batch).tolist() == []
    assert (window.lookups, window.distinct_rows) == (2, 0)
    with pytest.raises(RuntimeError, match="oldest lookup is not"):
        window.take(5)
    assert window.take(3) is None
    assert window.clear().tolist() == []
    assert window.lookups == 0


def test_window_wants_its_lookups_in_order() -> None:
    window, batch = _core.Window(), _core.batch_of_unique(np.array([1], np.uint64))
    window.announce(3, batch)
    with pytest.raises(RuntimeError, match="after a later lookup"):
        window.announce(3, batch)
    with pytest.raises(RuntimeError, match="oldest lookup is not"):
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
