"""Reading ahead: what it gives is what the store has, whatever is written or fails meanwhile."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.cache.read_ahead_rig import NEVER, Rig, wait_for, within_patience
from tierstore import _core

EVEN = range(0, 1000, 2)  # the keys that are stored


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def by_place(*keys: int) -> list[int]:
    return sorted(keys, reverse=True)


# -- what is read, and in which order ------------------------------------------------------------


def test_rows_of_many_lookups_come_in_the_order_of_their_places(rig: Rig) -> None:
    rig.resident = {4}
    for seq in range(3):
        rig.announce(seq, 2 * seq, 2 * seq + 1, *([6] if seq == 2 else []))
    rig.store.go.set()
    assert rig.plan(0, 0) == {0: 1}
    assert rig.store.asked == [by_place(0, 2, 6)]  # not the resident row, nor rows that are not stored
    assert rig.find(0, 1, 2, 3, 4, 5, 6, 7) == {2: 1, 6: 1}
    assert rig.plan(1, 2, 3) == {2: 1}
    assert rig.plan(2, 5, 6) == {6: 1}
    assert rig.ahead.memory_bytes() == 0


def test_nothing_is_read_before_a_lookup_begins(rig: Rig) -> None:
    """So that a window that is just being filled is one round."""
    rig.store.go.set()
    rig.announce(0, 2)
    rig.announce(1, 4)
    rig.wait_idle()
    assert not rig.store.asked
    assert rig.ahead.memory_bytes() == 2 * _core.Sweep.BYTES_PER_ENTRY
    rig.plan(0, 2)
    assert rig.store.asked == [[4, 2]]


def test_rounds_are_read_in_parts_as_room_comes(rig: Rig) -> None:
    rig.store.go.set()
    keys = [range(2 * seq, 960, 240) for seq in range(36)]  # four rows each, all over the places
    for seq in range(36):
        rig.announce(seq, *keys[seq])
    found = 0
    for seq in range(36):
        found += len(rig.plan(seq, *keys[seq]))
        assert rig.ahead.memory_bytes() <= rig.max_bytes
    rig.wait_idle()
    asked = rig.asked()
    assert 0.6 * 144 < found <= len(asked)
    assert len(asked) == len(set(asked)) <= 144
    for part in rig.store.asked:
        assert sum(a < b for a, b in itertools.pairwise(part)) <= 1  # the order of places, begun again once
    assert len(by_round(asked)) <= 6
    assert rig.ahead.memory_bytes() == 0


def by_round(asked: list[int]) -> list[list[int]]:
    rounds: list[list[int]] = []
    for key in asked:
        if not rounds or key > rounds[-1][-1]:
            rounds.append([])
        rounds[-1].append(key)
    return rounds


def test_only_what_a_lookup_lacks_has_to_fit(rig: Rig) -> None:
    rig.store.go.set()
    rig.resident = set(range(0, 196, 2))
    rig.announce(0, *range(0, 200, 2))
    rig.announce(1, 1)
    assert rig.plan(0, 196, 198) == {196: 1, 198: 1}
    assert rig.asked() == [198, 196]


def test_rows_that_one_part_asks_for_twice_are_read_once(rig: Rig) -> None:
    """A row that leaves memory before its lookup is queued again, and may still be in the sweep."""
    rig.store.go.set()
    for seq in range(4):
        rig.announce(seq, 2, 4, 6)
    assert rig.plan(0, 2, 4, 6) == {2: 1, 4: 1, 6: 1}
    assert rig.store.asked == [[6, 4, 2]]


def test_lookups_that_are_planned_already_are_not_read(rig: Rig) -> None:
    rig.store.go.set()
    rig.begin(3)
    rig.announce(3, 2)
    rig.announce(4, 4)
    rig.announce(5, 6)
    rig.announce(6, 8)
    rig.plan(5, 6)
    assert rig.asked() == [8, 6]


def test_the_horizon_grows_to_the_lookups_that_there_is_room_for(rig: Rig) -> None:
    """The first round is short, as the first plan waits for it. Each lookup then lets a later one in."""
    rig.store.go.set()
    keys = [range(10 * seq, 10 * seq + 10, 2) for seq in range(100)]  # five rows each; there is room for 80
    for seq in range(100):
        rig.announce(seq, *keys[seq])
    horizons = []
    for seq in range(100):
        rig.plan(seq, *keys[seq])
        rig.wait_idle()
        horizons.append(max(rig.asked()) // 10 - seq)
    assert 14 <= horizons[0] <= 16  # 75 rows: a sixteenth of the room is left to rows that come back
    assert 20 <= max(horizons) <= 24  # lookups with 1.5 times the rows that have room, since some are gone by
    assert all(a - 1 <= b for a, b in itertools.pairwise(horizons))
    assert len(rig.asked()) == len(set(rig.asked())) > 350


# -- versions ------------------------------------------------------------------------------------


def begun(rig: Rig, seq: int, *keys: int, later: tuple[int, ...] = ()) -> threading.Thread:
    """A plan that waits for a read of these rows, which is under way; the next lookup asks for ``later``."""
    rig.announce(seq, *keys)
    rig.announce(seq + 1, *later)
    rig.begin(seq)
    waiting = threading.Thread(target=rig.ahead.wait, args=(seq,), daemon=True)
    waiting.start()
    assert rig.store.begun.wait(20)
    return waiting


def ended(rig: Rig, waiting: threading.Thread) -> None:
    rig.store.go.set()
    waiting.join(20)
    assert not waiting.is_alive()
    rig.wait_idle()


def test_rows_written_during_or_after_the_read_are_not_given(rig: Rig) -> None:
    waiting = begun(rig, 0, 2, 4, 6, 8)
    rig.overwrite(2, 4, 99)
    assert rig.find(2, 4, 6, 8) == {}
    ended(rig, waiting)
    assert rig.find(2, 4, 6, 8) == {2: 1, 6: 1, 8: 1}
    rig.overwrite(2, 8, 7)
    assert rig.find(2, 4, 6, 8) == {2: 1, 6: 1}
    assert rig.ahead.memory_bytes() == rig.held_bytes(2)


def test_a_row_kept_while_its_old_version_is_on_its_way_stays(rig: Rig) -> None:
    waiting = begun(rig, 0, 2, 4)
    rig.keep(2, {4: 1})
    assert rig.find(2, 4) == {4: 2}
    ended(rig, waiting)
    assert rig.find(2, 4) == {2: 1, 4: 2}


def test_rows_that_a_plan_has_read_itself_meanwhile_are_not_held(rig: Rig) -> None:
    waiting = begun(rig, 0, 2, 4)
    rig.take(4)
    ended(rig, waiting)
    assert rig.find(2, 4) == {2: 1}
    rig.take(2)
    assert rig.ahead.memory_bytes() == 0


def test_what_is_read_when_the_window_is_forgotten_is_dropped(rig: Rig) -> None:
    waiting = begun(rig, 0, 2)
    with rig.lock:
        rig.ahead.forget()
    waiting.join(20)
    assert not waiting.is_alive()  # the plan does not wait for rows that it will not get
    rig.announce(1, 4, 2)
    rig.announce(2, 6)
    rig.begin(1)
    rig.store.go.set()
    rig.wait_idle()
    within_patience(lambda: rig.ahead.wait(1))
    rig.wait_idle()
    assert rig.find(2, 4, 6) == {2: 1, 4: 1, 6: 1}
    assert rig.store.asked == [[2], [6, 4, 2]]
    rig.take(2, 4, 6)
    assert rig.ahead.memory_bytes() == 0


def test_a_read_that_fails_leaves_everything_to_the_plans(rig: Rig) -> None:
    for seq in range(3):
        rig.announce(seq, 2 * seq)
    rig.fail_reads()
    rig.store.go.set()
    assert rig.plan(0, 0) == {}
    assert rig.plan(1, 2) == {}
    wait_for(lambda: not rig.ahead._threads)
    assert rig.store.asked == [[4, 2, 0]]
    assert rig.ahead.memory_bytes() == 0
    rig.store.error = None
    rig.announce(3, 6)
    rig.announce(4, 8)
    assert rig.plan(3, 6) == {6: 1}


def test_what_is_not_foreseen_is_told_once(rig: Rig) -> None:
    rig.announce(1, 2)
    rig.announce(2, 4)
    rig.store.error = ZeroDivisionError("a mistake")
    rig.store.go.set()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        rig.plan(1, 2)
    assert rig.plan(2, 4) == {}


# -- waiting -------------------------------------------------------------------------------------


def test_the_first_plan_waits_for_the_first_round(rig: Rig) -> None:
    waiting = begun(rig, 5, 2, later=(4,))
    waiting.join(0.05)
    assert waiting.is_alive()
    ended(rig, waiting)
    assert rig.find(2, 4) == {2: 1, 4: 1}


def test_a_plan_does_not_wait_for_later_lookups(rig: Rig) -> None:
    rig.store.go.set()
    for seq in range(36):
        rig.announce(seq, *range(2 * seq, 720, 72))
    rig.plan(0, *range(0, 720, 72))
    rig.wait_idle()
    rig.store.begun.clear()
    rig.store.go.clear()
    for seq in range(1, 20):  # the first round has gone by, some way that depends on the threads
        rig.plan(seq, *range(2 * seq, 720, 72))
        if rig.store.begun.wait(0.5):
            break
    assert rig.store.begun.is_set()  # meanwhile, rows of later lookups are being read


def test_a_plan_does_not_wait_where_there_is_no_room(rig: Rig) -> None:
    rig.store.go.set()
    rig.announce(0, 2)
    rig.announce(9, 4)
    rig.plan(0, 2)
    rig.keep(2, {key: 9 for key in range(500, 660, 2)})
    assert len(rig.find(*range(500, 660, 2))) == 79  # the row of the next lookup is here, too
    rig.announce(10, *range(300, 320, 2))
    rig.announce(11, 8)
    rig.begin(9)
    rig.begin(10)
    assert rig.ahead._is_awaited() or not rig.ahead._has_room()
    assert rig.plan(10, *range(300, 320, 2)) == {}
    assert len(rig.find(*range(500, 660, 2))) == 79


def test_a_plan_waits_no_longer_than_a_round_that_has_no_rows(rig: Rig) -> None:
    rig.store.looked_up.clear()
    rig.announce(0, 1, 3)
    rig.announce(1, 5)
    rig.begin(0)
    waiting = threading.Thread(target=rig.ahead.wait, args=(0,), daemon=True)
    waiting.start()
    wait_for(lambda: rig.ahead._waits)
    rig.store.looked_up.set()
    ended(rig, waiting)
    assert not rig.store.asked


def test_plans_do_not_wait_without_a_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        rig.announce(0, 2)
        rig.announce(1, 4)
        rig.begin(0)
        rig.ahead.wait(0)
        assert rig.find(2, 4) == {}
    rig.store.go.set()
    for seq in range(2, 5):
        rig.announce(seq, 2 * seq + 2)
    rig.plan(2, 6)
    assert rig.plan(3, 8) == {8: 1}


def test_closing_ends_a_wait(rig: Rig) -> None:
    waiting = begun(rig, 0, 2)
    closing = threading.Thread(target=rig.ahead.close, daemon=True)
    closing.start()
    waiting.join(20)
    assert not waiting.is_alive()
    ended(rig, closing)
    rig.announce(1, 4)
    rig.keep(2, {6: 1})
    assert rig.find(2, 4, 6) == {}
    assert rig.ahead.memory_bytes() == 0


# -- rows that come back -------------------------------------------------------------------------


def test_rows_that_come_back_are_kept_until_they_are_taken_or_written(rig: Rig) -> None:
    rig.store.go.set()
    for seq in range(3, 7):
        rig.announce(seq, 100 + seq)  # odd and even keys; those are all in the horizon
    rig.plan(3, 103)
    rig.keep(2, {2: 4, 4: 6, 6: 3, 8: NEVER})
    assert rig.find(2, 4, 6, 8) == {2: 2, 4: 2}
    assert rig.plan(4, 2, 8, 104) == {2: 2, 104: 1}
    assert rig.find(2, 4) == {4: 2}
    rig.keep(3, {4: 6})
    assert rig.find(4) == {4: 3}
    rig.overwrite(4, 4)
    assert rig.find(4) == {}
    rig.keep(4, {4: 6})
    with rig.lock:
        rig.ahead.forget()
    assert rig.find(4) == {}
    assert rig.ahead.memory_bytes() == 0


def test_kept_rows_that_are_wanted_beyond_the_horizon_are_read_again(rig: Rig) -> None:
    rig.store.go.set()
    for seq in range(36):
        rig.announce(seq, *range(8 * seq, 8 * seq + 8, 2))
    rig.plan(0, *range(0, 8, 2))
    rig.keep(2, {900: 35, 902: 3, 904: 35})
    assert rig.find(900, 902, 904) == {902: 2}
    for seq in range(1, 35):
        rig.plan(seq, *range(8 * seq, 8 * seq + 8, 2), *((902,) if seq == 3 else ()))
        assert rig.ahead.memory_bytes() <= rig.max_bytes
    rig.announce(36, 1)
    assert {900, 904} <= rig.plan(35, *range(280, 288, 2), 900, 904).keys()
    assert rig.asked().count(900) == 1
    assert 902 not in rig.asked()
    rig.plan(36, 1)
    rig.wait_idle()
    assert rig.ahead.memory_bytes() == 0


def test_rows_that_leave_where_there_is_no_room_are_read_again(rig: Rig) -> None:
    """Those used last are evicted first, so the rows that are kept are the last of those that leave."""
    rig.store.go.set()
    for seq in range(20):
        rig.announce(seq, 2 * seq)
    rig.plan(0, 0)
    here = 19  # the other rows of the first round
    leave = range(500, 660, 2)  # 80
    rig.keep(2, dict.fromkeys(leave, 19))
    assert rig.find(*leave) == {key: 2 for key in leave[here:]}
    assert rig.ahead.memory_bytes() <= rig.max_bytes
    rig.plan(1, 2, *leave[here:])
    for seq in range(2, 19):
        assert rig.plan(seq, 2 * seq) == {2 * seq: 1}
        rig.wait_idle()
    rig.announce(20, 1)
    found = rig.plan(19, 38, *leave[:here])
    assert found == {38: 1, **{key: 2 for key in found if key != 38}}
    assert len(found) > here // 2
    rig.plan(20, 1)
    rig.wait_idle()
    assert rig.ahead.memory_bytes() == 0


def test_rows_that_another_lookup_has_brought_in_are_not_read_again(rig: Rig) -> None:
    rig.store.go.set()
    with rig.lock:
        for seq in range(4):
            rig.announce(seq, 2 * seq)
        rig.ahead.lookup_filled(np.array([6], np.uint64), 1)  # by a lookup that nobody has announced
        rig.resident = {6}
    rig.plan(0, 0)
    rig.wait_idle()
    assert 6 not in {key for asked in rig.store.asked for key in asked}
    assert rig.find(6) == {}
