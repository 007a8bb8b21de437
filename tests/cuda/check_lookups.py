"""What lookups that a GPU makes must be: those of the host. On a fake GPU and on silicon."""

from __future__ import annotations

import numpy as np

from tests.cuda.test_emulated_batches import Segment, described
from tierstore import _core
from tierstore.cuda.device import CudaDevice


def random_segments(rng: np.random.Generator, most: int) -> list[Segment]:
    """Segments of up to ``most`` ids of four tables, with repeats and padding."""
    bounds = rng.choice([2, 40, 128, 5000, 1 << 20, 1 << 28], 4)
    segments: list[Segment] = [(np.array([1, 0, 1]), 0, int(bounds[0]), -1)]
    for _ in range(int(rng.integers(1, 7))):
        table = int(rng.integers(4))
        bound, n = int(bounds[table]), int(rng.integers(0, most))
        ids = rng.integers(0, bound, n) // int(rng.choice([1, 7]))
        dtype = np.int32 if rng.random() < 0.5 else np.int64
        segments.append((ids.astype(dtype), table, bound, int(rng.choice([-1, 0, bound - 1]))))
    return segments


def criteo_like(rng: np.random.Generator, batch_size: int) -> list[Segment]:
    """One id per example and table, of tables like those of Criteo: small ones, and large ones with few
    ids that are asked for often."""
    bounds = [10**7, 4 * 10**7, 3 * 10**6, 10**6, 20_000, 2_000, 63, 10, 4, 3]
    return [
        (np.minimum(rng.pareto(0.6, batch_size) * bound / 1000, bound - 1).astype(np.int64), table, bound, -1)
        for table, bound in enumerate(bounds)
    ]


def check_made(device: CudaDevice, segments: list[Segment], *, bring: bool = True) -> _core.Batch:
    """Compare a lookup that the device makes with the host's, and return it. ``bring``: compare also what
    stays on the GPU."""
    batch, *bad = device.make_batch(described(segments))
    expected, *expected_bad = _core.make_batch(described(segments))
    assert bad == expected_bad
    if bad[0] < 0:
        np.testing.assert_array_equal(batch.unique, expected.unique)
        (start, positions), (expected_start, expected_positions) = batch.transposed(), expected.transposed()
        np.testing.assert_array_equal(start, expected_start)
        assert len(batch.device_inverse) == len(expected.inverse)
        if bring:
            np.testing.assert_array_equal(batch.inverse, expected.inverse)
            np.testing.assert_array_equal(positions, expected_positions)
    return batch
