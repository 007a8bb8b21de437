"""Two threads read ahead: one chooses the next part of a round while the other reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.cache.read_ahead_rig import Rig, wait_for, within_patience
from tierstore.cache.tiers import read_ahead

KEYS = range(0, 1000, 125 * 2)  # four rows, far apart


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(read_ahead, "_MOST_AT_ONCE", 2)
    monkeypatch.setattr(read_ahead, "_LEFT_TO_PLANS", 0.0)
    rig = Rig()
    yield rig
    rig.close()


def both_read(rig: Rig) -> None:
    rig.announce(0, *KEYS)
    rig.announce(1, 1, 3)
    rig.begin(0)
    wait_for(lambda: len(rig.store.asked) == 2)


def test_the_next_part_is_chosen_while_one_is_read(rig: Rig) -> None:
    both_read(rig)
    assert rig.asked() == sorted(KEYS, reverse=True)
    assert not rig.find(*KEYS)
    rig.store.go.set()
    assert rig.plan(0, *KEYS) == dict.fromkeys(KEYS, 1)


def test_a_plan_waits_for_every_part_that_is_read_for_it(rig: Rig) -> None:
    both_read(rig)
    ended = threading.Event()

    def plan() -> None:
        rig.ahead.wait(0)
        ended.set()

    waiting = threading.Thread(target=plan, daemon=True)
    waiting.start()
    assert not ended.wait(0.05)
    rig.store.go.set()
    assert ended.wait(20)
    assert rig.find(*KEYS) == dict.fromkeys(KEYS, 1)


def test_rows_written_during_both_reads_are_the_new_ones(rig: Rig) -> None:
    both_read(rig)
    rig.overwrite(7, KEYS[0], KEYS[-1])
    rig.store.go.set()
    found = rig.plan(0, *KEYS)
    assert found == dict.fromkeys(KEYS[1:-1], 1)


def test_the_window_is_forgotten_during_both_reads(rig: Rig) -> None:
    both_read(rig)
    with rig.lock:
        rig.ahead.forget()
    assert not rig.find(*KEYS)
    rig.announce(2, 6, 8)
    rig.store.go.set()
    assert rig.plan(2, 6, 8) == {6: 1, 8: 1}
    rig.wait_idle()
    assert not rig.find(*KEYS)


def test_a_failure_of_both_is_nobodys_but_the_readers(rig: Rig) -> None:
    both_read(rig)
    rig.fail_reads()
    rig.store.go.set()
    within_patience(lambda: rig.ahead.wait(0))
    wait_for(lambda: not rig.ahead._threads)
    assert not rig.find(*KEYS)
    rig.store.error = None
    rig.announce(1, 2, 4)
    assert rig.plan(1, 2, 4) == {2: 1, 4: 1}


def test_close_waits_for_both(rig: Rig) -> None:
    both_read(rig)
    closing = threading.Thread(target=rig.ahead.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    rig.store.go.set()
    closing.join(20)
    assert not closing.is_alive()
    assert not rig.ahead._threads


def test_one_thread_suffices(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tierstore-read-ahead":
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    rig.announce(0, *KEYS)
    rig.store.go.set()
    assert rig.plan(0, *KEYS) == dict.fromkeys(KEYS, 1)
    assert len(started) == 1
