"""The limits of reading ahead, one short of them, exactly at them and one beyond."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cache.read_ahead_rig import PATIENCE, Rig, wait_for, within_patience
from tierstore import _core
from tierstore.cache.tiers import horizon, read_ahead

EVEN = range(0, 1000, 2)  # the keys that are stored


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.store.go.set()
    yield rig
    rig.close()


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 4)])
def test_parts_have_so_many_rows_at_most(
    rows: int, parts: int, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_MOST_AT_ONCE", 4)
    monkeypatch.setattr(read_ahead, "_LEFT_TO_PLANS", 0.0)
    keys = [2 * (i * 500 // rows) for i in range(rows)]
    rig.announce(0, *keys)
    assert rig.plan(0, *keys) == dict.fromkeys(keys, 1)
    assert [len(part) for part in rig.store.asked[:-1]] == [4] * (parts - 1)
    assert rig.asked() == sorted(keys, reverse=True)
    rig.wait_idle()
    assert rig.ahead.memory_bytes() == 0


@pytest.mark.parametrize(("rows", "last"), [(2, -1), (3, 0), (5, 0), (6, 1), (7, 1), (8, 1), (9, 2), (12, 3)])
def test_the_first_round_has_whole_lookups(
    rows: int, last: int, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizon, "_FIRST_ROWS", rows)
    for seq in range(4):
        rig.announce(seq, *range(6 * seq, 6 * seq + 6, 2))
    rig.store.go.clear()
    with rig.lock:
        first = rig.ahead._horizon
        first.begin(0, 0.0, rig.ahead._room())
        assert first.end == max(0, last)  # the first lookup is read in any case
    rig.store.go.set()
    for seq in range(4):
        keys = range(6 * seq, 6 * seq + 6, 2)
        found = rig.plan(seq, *keys)
        assert set(found.values()) <= {1}
        if seq == 0:
            assert found == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("parts", [1, 2, 79, 80, 81, 1000])
@pytest.mark.parametrize("rows", [1, 2, 80])
def test_rounds_in_any_number_of_parts_end(parts: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_PARTS", parts)
    rig = Rig(rows)
    rig.store.go.set()
    keys = [range(2 * seq, 960, 240) for seq in range(36)]
    for seq in range(36):
        rig.announce(seq, *keys[seq])
    for seq in range(36):
        assert set(rig.plan(seq, *keys[seq]).values()) <= {1}
        assert rig.ahead.memory_bytes() <= rig.max_bytes + 4 * 36 * 16
    rig.wait_idle()
    assert len(set(rig.asked())) == len(rig.asked())
    assert not rig.find(*EVEN)
    rig.close()
    assert rig.ahead.memory_bytes() == 0


def test_a_lookup_that_lacks_more_rows_than_there_is_room_for_is_read_in_part(rig: Rig) -> None:
    rig.announce(0, *EVEN)
    rig.announce(1, 1, 3)
    rig.begin(0)
    within_patience(lambda: rig.ahead.wait(0))
    found = rig.find(*EVEN)
    assert 60 <= len(found) <= 80
    assert sorted(found) == list(EVEN)[len(EVEN) - len(found) :]
    assert rig.ahead.memory_bytes() <= rig.max_bytes + (len(EVEN) - len(found)) * _core.Sweep.BYTES_PER_ENTRY
    rig.take(*EVEN)
    rig.plan(1, 1, 3)
    rig.wait_idle()
    assert rig.find(*EVEN) == {}


def test_a_round_goes_on_early_while_there_is_room(rig: Rig) -> None:
    keys = [range(2 * seq, 960, 240) for seq in range(36)]  # four rows each, all over the places
    for seq in range(36):
        rig.announce(seq, *keys[seq])
    early = []
    for seq in range(30):
        rig.plan(seq, *keys[seq])
        rig.wait_idle()
        with rig.lock:
            early.append(rig.ahead._rounds - rig.ahead._horizon.due)
            if rig.ahead._room() < rig.ahead.max_rows * read_ahead._ROOMY:
                assert early[-1] <= 0.01
        assert rig.ahead.memory_bytes() <= rig.max_bytes
    assert 0.1 < max(early) <= read_ahead._EARLY + 0.01
    assert not rig.ahead._is_awaited()  # no later plan waits for a round


@pytest.mark.parametrize(("free", "early"), [(9, False), (10, True)])
def test_only_a_round_with_room_is_early(free: int, early: bool, rig: Rig) -> None:
    for seq in range(9):
        rig.announce(seq, *range(2 * seq, 960, 240))
    rig.plan(0, *range(0, 960, 240))
    rig.wait_idle()
    with rig.lock:
        kept = max(0, rig.ahead._room() - free)
        rig.keep(2, dict.fromkeys(range(1, 2 * kept, 2), 5))
        rig.ahead._horizon.due = rig.ahead._rounds  # no part of a round is due
        assert rig.ahead._has_room()
        assert rig.ahead._room() == free
        assert (rig.ahead._way() > 0) is early


@pytest.mark.parametrize(("left", "waits"), [(0, False), (1, False), (2, True)])
def test_a_plan_leaves_a_256th_of_a_round_to_itself(
    left: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round has 256 places, of which ``left`` are read while the plan asks."""
    monkeypatch.setattr(read_ahead, "_MOST_AT_ONCE", 256 - left)
    rig = Rig(rows=2000)
    rig.store.version = dict.fromkeys(range(256), 1)
    rig.store.place = lambda key: key  # type: ignore[method-assign]
    reads, read = iter(range(2)), rig.store.read
    first_is_read, second_begins = threading.Event(), threading.Event()

    def one_then_another(keys: Any, *rest: Any) -> Any:
        if next(reads) == 0:
            rig.store.go.set()
            assert not left or second_begins.wait(PATIENCE)
            found = read(keys, *rest)
            rig.store.go.clear()
            first_is_read.set()
            return found
        second_begins.set()
        assert first_is_read.wait(PATIENCE)
        return read(keys, *rest)

    rig.store.read = one_then_another  # type: ignore[method-assign]
    rig.announce(0, *range(256))
    rig.begin(0)
    assert first_is_read.wait(PATIENCE)
    wait_for(lambda: len(rig.find(*range(256))) == 256 - left)
    planned = threading.Thread(target=lambda: rig.ahead.wait(0))
    planned.start()
    planned.join(0.2 if waits else PATIENCE)
    assert planned.is_alive() == waits
    rig.store.go.set()
    planned.join(PATIENCE)
    assert len(rig.find(*range(256))) == 256 or not waits
    rig.close()
