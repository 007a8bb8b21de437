"""Whole-row copies, the transpose of a batch, and arguments that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore import _core as core


@pytest.mark.parametrize("row_bytes", [16, 48, 272, 4096])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies(row_bytes: int, threads: int) -> None:
    rng = np.random.default_rng(row_bytes)
    rows = rng.integers(0, 256, (4000, row_bytes), dtype=np.uint8)
    slots = rng.permutation(4000)[:3000].astype(np.int32)
    before = core.num_threads()
    core.set_num_threads(threads)
    out = np.zeros((3000, row_bytes), np.uint8)
    core.HostRows.view(rows).copy_out(slots, out)
    np.testing.assert_array_equal(out, rows[slots])

    copy = np.zeros_like(rows)
    into = core.HostRows.view(copy)
    into.copy_in(slots, out)
    np.testing.assert_array_equal(copy[slots], rows[slots])
    assert not copy[np.setdiff1d(np.arange(4000), slots)].any()

    source = rng.integers(0, 3000, 500).astype(np.int32)
    into.copy_in(slots[:500], out, source)
    np.testing.assert_array_equal(copy[slots[:500]], out[source])
    core.set_num_threads(before)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_build_csr(n: int) -> None:
    inverse = np.random.default_rng(n).integers(-1, 50, n).astype(np.int32)
    start, positions = core.build_csr(inverse, 60)
    assert start.dtype == positions.dtype == np.int32
    assert len(start) == 61
    for u in range(60):
        np.testing.assert_array_equal(positions[start[u] : start[u + 1]], np.flatnonzero(inverse == u))


def test_build_csr_rejects_entries_beyond_the_unique_rows() -> None:
    with pytest.raises(ValueError, match="num_unique"):
        core.build_csr(np.array([0, 3], np.int32), 3)


I64 = np.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.array([0, 4, 3], I64)}, "decrease"),
        ({"offsets": np.array([0, 1, 4], I64)}, "offsets must end"),
        ({"offsets": np.array([1, 1, 3], I64)}, "start at 0"),
        ({"bag_start": np.array([0, 1], I64)}, "bag_start"),
        ({"bag_start": np.array([0, 1, 2], I64)}, "bag_start"),
        ({"modes": np.array([3], np.uint8)}, "modes"),
        ({"inverse": np.array([0, 1, 2], np.int32)}, "inverse"),
        ({"row_bytes": 20}, "multiple of 16"),
        ({"row_bytes": 16}, "smaller"),
        ({"dim": 0}, "dim"),
    ],
)
def test_lookup_rejects_what_does_not_fit(change: dict, message: str) -> None:
    out = np.zeros((2, 5), np.float32)
    arguments = {
        "row_bytes": 32,
        "dim": 5,
        "slots": np.array([1, 2], np.int32),
        "inverse": np.array([0, 1, -1], np.int32),
        "offsets": np.array([0, 1, 3], I64),
        "bag_start": np.array([0, 2], I64),
        "out_offset": np.array([0], I64),
        "out_stride": np.array([5], I64),
        "modes": np.array([0], np.uint8),
    }

    def look_up(row_bytes: int, dim: int, slots: np.ndarray, inverse: np.ndarray, **bags: np.ndarray) -> None:
        rows = core.HostRows.view(np.zeros((4, row_bytes), np.uint8))
        args = core.LookupArgs(dim=dim, slots=slots, inverse=inverse)
        rows.lookup_pooled(args, core.Bags(**bags), out.ctypes.data)

    look_up(**arguments)
    with pytest.raises(ValueError, match=message):
        look_up(**{**arguments, **change})


def test_arrays_of_another_dtype_are_not_converted() -> None:
    with pytest.raises(TypeError):
        core.build_csr(np.zeros(3, np.int64), 3)


def test_optimizer_step_rejects_unknown_kinds() -> None:
    with pytest.raises(ValueError, match="kind"):
        core.OptimizerStep(kind=10, lr=0.1)
    with pytest.raises(ValueError, match="step"):
        core.OptimizerStep(kind=3, lr=0.1, step=0)
    for limits in ((0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="limits of gradients must be above 0"):
            core.OptimizerStep(kind=0, lr=0.1).clipped(*limits)
