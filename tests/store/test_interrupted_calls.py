"""Ctrl-C in the calls of a store, of every registered engine."""

from __future__ import annotations

import threading

from tests.pipeline.interrupts import Interrupted, Interrupter
from tests.store.store_model import assert_holds, put


def test_a_caught_interrupt_holds_no_lock(opened):
    """Whoever catches Ctrl-C has its traceback in hand, with all its frames, while the store is closed by
    another thread."""
    store = opened()
    put(store, 1, range(10))
    store.commit()
    at, came = 1, True
    while came:
        interrupter = Interrupter(at)
        try:
            with interrupter.on():
                store.stats()
                store.commits()
                store.meta()
        except Interrupted:
            thread = threading.Thread(target=assert_holds, args=(store, 1, range(10)), daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        at, came = at + 1, interrupter.came
    assert at > 6
