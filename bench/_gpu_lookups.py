"""The part of ``tierstore bench gpu`` about lookups that the GPU deduplicates, beside the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tierstore.cache.device import HOST
from tierstore.data import load

from ._gpu_sizes import Figures, Setting
from ._gpu_training import read_batches

_BATCHES = 8


def made_lookups(setting: Setting) -> Figures:
    """Make lookups of batches on the GPU and on the host, compare them, and say what each takes: until the
    host may plan, and until the lookup's index arrays are given to the GPU, without waiting for them."""
    from tierstore.modules import open_cuda

    device: Any = open_cuda(None)
    bounds = [
        table.num_embeddings for table in load("synthetic:criteo", max_rows=setting.sizes.max_rows).tables
    ]
    batches = read_batches(Setting(setting.sizes, setting.folder, "cpu"), _BATCHES)
    of_batches = [_segments(batch.sparse.values(), bounds) for batch in batches]
    milliseconds: dict[str, list[tuple[float, float]]] = {"gpu": [], "host": []}
    same = 0
    for number, segments in enumerate(of_batches):
        ours = _timed(device, device.make_batch, segments, milliseconds["gpu"])
        theirs = _timed(device, HOST.make_batch, segments, milliseconds["host"])
        same += all(map(np.array_equal, _all_of(ours), _all_of(theirs)))
        del ours, theirs
        ids = sum(segment[1] for segment in segments)
        yield {"lookups": number + 1, "equal_to_the_host": same, "ids": ids}
        for name, found in milliseconds.items():
            planned, staged = np.median(found[1:] or found, axis=0).tolist()  # the first makes memory
            yield {
                f"{name}_ms": planned,
                f"{name}_staged_ms": staged,
                f"{name}_ids_per_s": 1e3 * ids / planned,
            }
    device.close()


def _segments(values: Any, bounds: list[int]) -> list[tuple[int, int, bool, int, int, int]]:
    """One id of each table per example, table by table; the tensor must outlive the segments."""
    count = values.numel() // len(bounds)
    begin, size = values.data_ptr(), values.element_size()
    return [
        (begin + table * count * size, count, size == 4, table, bound, -1)
        for table, bound in enumerate(bounds)
    ]


def _timed(
    device: Any, make: Callable[..., Any], segments: list[Any], found: list[tuple[float, float]]
) -> Any:
    begin = time.perf_counter()
    batch, *_ = make(segments)
    csr = batch.transposed()
    planned = time.perf_counter()
    slots = np.arange(len(batch.unique), dtype=np.int32)
    device.stage(slots, batch.device_inverse, csr, ())
    found.append((1e3 * (planned - begin), 1e3 * (time.perf_counter() - begin)))
    device.synchronize()
    return batch


def _all_of(batch: Any) -> list[Any]:
    batch.bring()
    return [batch.unique, batch.inverse, *batch.transposed()]
