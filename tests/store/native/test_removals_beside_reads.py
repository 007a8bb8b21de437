"""Segments that nothing needs go as soon as a read has their rows, however much else that read waits for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.store.store_model import CAP, TABLES, get, put
from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store.native import NativeConfig, NativeStore

SLOW = 0.1  # seconds of a request
SEGMENT = 1 << 20
OF_SEGMENT = 3_700  # rows of 272 bytes with their headers: a little less than fit
APART = 64  # rows, so that each is a request of its own


@pytest.mark.timeout(120)
def test_a_segment_goes_before_the_read_of_other_segments_ends(tmp_path):
    """In a full store a writer waits for the space of that segment."""
    env = _core.FaultEnv(_core.posix_env(str(tmp_path)))
    config = NativeConfig(cap_bytes=CAP, segment_bytes=SEGMENT)
    store = NativeStore(tmp_path, TABLES, config=config, env=env)
    for part in range(3):
        put(store, 1, range(part * OF_SEGMENT, (part + 1) * OF_SEGMENT))
        store.commit()
    store.close()
    store = NativeStore(tmp_path, TABLES, config=config, env=env)
    first = min(tmp_path.rglob("*.seg"))  # names are numbers

    ids = np.array([0, *range(OF_SEGMENT, 3 * OF_SEGMENT, APART)])
    rows, found = np.zeros((len(ids), 272), np.uint8), []
    read = threading.Thread(target=lambda: found.append(store.read(make_keys(1, ids), rows)))
    env.slow_down(SLOW)
    before = env.counts()["read"]
    read.start()
    while env.counts()["read"] < before + 3:
        time.sleep(0.01)
    for version in (1, 2):  # so that no commit has the first segment any more
        put(store, 1, range(OF_SEGMENT), version)
        store.commit()
    while first.exists() and read.is_alive():
        time.sleep(0.01)
    went_before = read.is_alive()
    env.heal()
    read.join()
    assert found[0].all()
    assert went_before
    assert not first.exists()
    assert get(store, 1, [0, OF_SEGMENT])[0].all()
    store.close()
