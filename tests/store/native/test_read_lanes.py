"""Reads of different sizes at the same time: a small one does not wait until larger ones have ended."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.store.store_model import CAP, TABLES, get, put
from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store.native import NativeConfig, NativeStore

SLOW = 0.2  # seconds of a request
ROWS = 20_000


@pytest.mark.timeout(60)
def test_a_small_read_does_not_wait_for_two_larger_ones(tmp_path):
    """As a plan reads the few rows that two threads that read ahead have not brought yet."""
    env = _core.FaultEnv(_core.posix_env(str(tmp_path)))
    store = NativeStore(tmp_path, TABLES, config=NativeConfig(cap_bytes=CAP), env=env)
    put(store, 1, range(ROWS), 0)
    store.commit()
    store.close()
    store = NativeStore(tmp_path, TABLES, config=NativeConfig(cap_bytes=CAP), env=env)
    larger = [
        threading.Thread(target=store.read, args=(make_keys(1, ids), np.zeros((len(ids), 272), np.uint8)))
        for ids in np.array_split(np.arange(ROWS), 2)
    ]
    env.slow_down(SLOW)
    before = env.counts()["read"]
    for thread in larger:
        thread.start()
    while env.counts()["read"] < before + len(larger):
        time.sleep(0.01)
    found, _ = get(store, 1, range(7, ROWS, ROWS // 4))
    others = [thread.is_alive() for thread in larger]
    env.heal()
    for thread in larger:
        thread.join()
    store.close()
    assert found.all()
    assert others == [True, True]
