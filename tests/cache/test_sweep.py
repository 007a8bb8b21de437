"""The sweep over the places of rows: every row that a lookup asks for comes once, place after place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _core
from tierstore.store.protocol import NOWHERE

BUCKETS = 4096
LOOKUPS = st.integers(0, 9)
PLACES = st.one_of(
    st.integers(0, 40),
    st.integers(0, BUCKETS + 1),
    st.integers(0, 1 << 32),
    st.sampled_from([BUCKETS - 1, BUCKETS, 2 * BUCKETS - 1, 2 * BUCKETS, NOWHERE - 1, NOWHERE]),
)
ENTRIES = st.lists(st.tuples(PLACES, LOOKUPS), max_size=30)
WAYS = st.one_of(st.floats(0, 1.5), st.sampled_from([0.0, 1e-9, 1 / BUCKETS, 1.0]))
ALL = 1 << 40  # a limit that is never reached


def in_order(bucket: int) -> int:
    """When a bucket of a wide sweep is visited: 64 stretches come in the order of their reversed bits."""
    return int(f"{bucket // 64:06b}"[::-1], 2) * 64 + bucket % 64


class Checked:
    """A sweep beside the entries that it should have. The keys are the entries' numbers."""

    def __init__(self) -> None:
        self.sweep = _core.Sweep()
        self.entries: dict[int, tuple[int, int]] = {}  # place and lookup by key
        self.past: set[int] = set()  # may be gone: their lookups were before a read's first one
        self.added = self.farthest = 0

    def add(self, entries: list[tuple[int, int]]) -> None:
        keys = range(self.added, self.added + len(entries))
        self.added += len(entries)
        places, seqs = [place for place, _ in entries], [seq for _, seq in entries]
        self.sweep.add(np.array(keys, np.uint64), np.array(places, np.uint64), np.array(seqs, np.int64))
        for key, entry in zip(keys, entries, strict=True):
            if entry[0] != NOWHERE:
                self.entries[key] = entry
                self.farthest = max(self.farthest, entry[0])
        self.check_size()

    def next(self, way: float, limit: int, first: int, last: int) -> list[int]:
        before = self.sweep.rounds
        keys, earliest = self.sweep.next(way, limit, first, last)
        assert keys.dtype == np.uint64
        assert len(keys) <= limit
        given = [self.entries.pop(key) for key in keys.tolist()]  # KeyError: comes twice, or was never added
        assert all(first <= seq <= last for _, seq in given)
        assert earliest == min((seq for _, seq in given), default=last + 1)
        self.check_order([place for place, _ in given])
        self.past |= {key for key, (_, seq) in self.entries.items() if seq < first}
        assert before <= self.sweep.rounds <= before + min(way, 1) + 1 / self.visits() + 1e-9
        self.check_size()
        return keys.tolist()

    def shift(self) -> int:
        return max(0, self.farthest.bit_length() - 12)

    def visits(self) -> int:
        return BUCKETS if self.shift() else self.farthest + 1

    def check_order(self, places: list[int]) -> None:
        """Buckets come in their order, and the first one comes again at most once."""
        order = [in_order(place >> self.shift()) if self.shift() else place for place in places]
        steps_back = sum(a > b for a, b in itertools.pairwise(order))
        assert steps_back == 0 or (steps_back == 1 and order[-1] <= order[0])

    def check_size(self) -> None:
        gone = len(self.past & self.entries.keys())
        assert len(self.entries) - gone <= len(self.sweep) <= len(self.entries)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_row_that_a_lookup_asks_for_comes_once(data: st.DataObject) -> None:
    checked = Checked()
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            checked.add(data.draw(ENTRIES))
        else:
            limit = data.draw(st.one_of(st.integers(0, 12), st.just(ALL)))
            checked.next(data.draw(WAYS), limit, data.draw(LOOKUPS), data.draw(LOOKUPS))
    wanted = checked.entries.keys() - checked.past
    given = checked.next(1.0, ALL, 0, 9) + checked.next(1.0, ALL, 0, 9)
    assert wanted <= set(given)
    assert len(checked.sweep) == 0
    assert checked.sweep.next(1.0, ALL, 0, 9)[0].tolist() == []


@settings(deadline=None, max_examples=300)
@given(st.data(), LOOKUPS)
def test_a_round_comes_by_every_row(data: st.DataObject, last: int) -> None:
    """However small its parts are, and wherever it begins."""
    checked = Checked()
    checked.add(data.draw(ENTRIES))
    checked.next(data.draw(WAYS), data.draw(st.integers(0, 12)), 0, last)
    checked.add([entry for entry in data.draw(ENTRIES) if entry[0] <= checked.farthest])
    wanted = {key for key, (_, seq) in checked.entries.items() if seq <= last}
    end = checked.sweep.rounds + 1
    parts = st.tuples(st.floats(0.05, 1), st.integers(1, 12))
    given: list[int] = []
    while (left := end - checked.sweep.rounds) > 0:
        way, limit = data.draw(parts)
        given += checked.next(min(way, left), limit, 0, last)
    assert set(given) == wanted
    assert {seq for _, seq in checked.entries.values() if seq <= last} == set()


def test_places_come_in_order_where_buckets_are_narrow() -> None:
    sweep, places = _core.Sweep(), np.random.default_rng(0).permutation(BUCKETS).astype(np.uint64)
    sweep.add(places + np.uint64(7), places, np.zeros(BUCKETS, np.int64))
    first, _ = sweep.next(1.0, 1000, 0, 0)
    assert first.tolist() == list(range(7, 1007))
    assert sweep.rounds == pytest.approx(1000 / BUCKETS)
    sweep.add(np.array([1, 2], np.uint64), np.array([5, 2000], np.uint64), np.zeros(2, np.int64))
    rest, _ = sweep.next(1.0, ALL, 0, 0)
    assert rest.tolist() == [*range(1007, 2008), 2, *range(2008, BUCKETS + 7), 1]
    assert len(sweep) == 0


def test_what_wider_buckets_hold_together_comes_together() -> None:
    """The widest place makes 52 halvings; the sweep then is where it was, as nearly as buckets can say."""
    sweep, seqs = _core.Sweep(), np.zeros(BUCKETS, np.int64)
    places = np.arange(BUCKETS, dtype=np.uint64)
    sweep.add(places, places, seqs)
    sweep.next(0.5, ALL, 0, 0)
    sweep.add(np.array([BUCKETS], np.uint64), np.array([2 * BUCKETS - 1], np.uint64), seqs[:1])
    rest, _ = sweep.next(0.5, ALL, 0, 0)  # the second half of a round has the stretches with odd numbers
    assert sorted(rest.tolist()) == [
        *(key for key in range(BUCKETS // 2, BUCKETS) if key // 2 // 64 % 2),
        BUCKETS,
    ]
    assert len(sweep.next(0.5, ALL, 0, 0)[0]) == BUCKETS // 4
    sweep.add(places, places, seqs)
    sweep.add(places[:1], np.array([NOWHERE - 1], np.uint64), seqs[:1])
    everything, _ = sweep.next(1.0, ALL, 0, 0)
    assert sorted(everything.tolist()) == sorted([*range(BUCKETS), 0])


def test_later_lookups_wait_and_earlier_ones_go() -> None:
    sweep = _core.Sweep()
    sweep.add(np.arange(6, dtype=np.uint64), np.zeros(6, np.uint64), np.arange(6))
    keys, earliest = sweep.next(1.0, ALL, 2, 3)
    assert (keys.tolist(), earliest, len(sweep)) == ([2, 3], 2, 2)
    keys, earliest = sweep.next(1.0, ALL, 6, 8)
    assert (keys.tolist(), earliest, len(sweep)) == ([], 9, 0)


def test_rows_that_are_not_stored_are_not_asked_for() -> None:
    sweep = _core.Sweep()
    sweep.add(np.arange(3, dtype=np.uint64), np.full(3, NOWHERE, np.uint64), np.zeros(3, np.int64))
    assert len(sweep) == 0
    assert sweep.rounds == 0
    assert sweep.next(1.0, ALL, 0, 9)[0].tolist() == []
    assert sweep.rounds == 1
