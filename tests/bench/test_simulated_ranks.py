"""Threads of simulated ranks end with the call that started them."""

from __future__ import annotations

import itertools
import signal
import threading

import pytest

from tierstore.simulation.tables import Ranks, run_ranks


def test_an_interrupt_ends_the_threads_of_all_ranks() -> None:
    ranks = Ranks(2)

    def exchange(rank: int) -> None:
        for number in itertools.count():
            ranks.give("ids", number, rank, number)
            ranks.take("ids", number)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, exchange, ranks)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("simulated-rank")]
