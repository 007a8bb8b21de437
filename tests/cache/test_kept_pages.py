"""Pages of arrays that every batch needs are kept, whatever larger batches have left behind."""

from __future__ import annotations

import resource

import numpy as np

from tierstore import _core

SMALL, LARGE = 448 << 10, 896 << 10


def array(nbytes: int) -> np.ndarray:
    rows = _core.rows_array(nbytes // 16, 16)
    rows.fill(1)
    return rows


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_pages_that_nobody_wants_make_room_for_what_every_batch_needs():
    peak = [array(SMALL) for _ in range(40)]
    del peak
    per_batch = []
    for _ in range(20):
        before = faults()
        large, small = array(LARGE), [array(SMALL) for _ in range(4)]
        del large
        del small
        per_batch.append(faults() - before)
    assert max(per_batch[5:]) < 50, per_batch  # the large one alone has 224 pages
