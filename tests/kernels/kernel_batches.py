"""Random batches, rows and optimizer steps for tests of kernels, on the CPU and in the GPU emulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tests.kernels.kernel_oracle import KINDS, Batch, Step
from tierstore import _core as core

DIMS = st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 63, 64, 65, 100, 127, 128, 129, 150, 300]))


def make_rows(rng: np.random.Generator, num_slots: int, floats: int, special: bool) -> np.ndarray:
    width = -(-floats // 4) * 4
    rows = rng.standard_normal((num_slots, width)).astype(np.float32)
    if special:
        rows[rng.random(rows.shape) < 0.1] = 0.25  # ties for max
        rows[rng.random(rows.shape) < 0.02] = np.nan
    rows[:, floats:] = 0
    return rows


def rows_batch(slots: np.ndarray, inverse: np.ndarray) -> Batch:
    """Return a batch without bags, with its positions by unique row."""
    batch = Batch(
        slots=slots, inverse=inverse, offsets=np.empty(0), bag_start=np.empty(0), out_offset=np.empty(0),
        out_stride=np.empty(0), modes=np.empty(0),
    )  # fmt: skip
    batch.csr = core.build_csr(inverse, len(slots))
    return batch


def counted_batch(rng: np.random.Generator, counts: Sequence[int]) -> Batch:
    """Return a batch without bags whose unique row i has ``counts[i]`` positions, in random order."""
    inverse = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    return rows_batch(np.arange(len(counts), dtype=np.int32)[::-1].copy(), inverse)


@st.composite
def batches(
    draw: st.DrawFn, dims: st.SearchStrategy[int] = DIMS, longest: int = 11
) -> tuple[np.random.Generator, int, int, Batch, int]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dim = draw(dims)
    features = draw(st.integers(1, 4))
    bags_per_feature = rng.integers(0, 6, features)
    lengths = rng.integers(0, 1 + draw(st.integers(0 if longest > 1 else 1, longest)), bags_per_feature.sum())
    n = int(lengths.sum())
    num_unique = 1 + draw(st.integers(0 if longest > 1 else 1, longest))
    inverse = rng.integers(0, num_unique, n).astype(np.int32)
    inverse[rng.random(n) < draw(st.sampled_from([0.0, 0.3]))] = -1
    num_slots = num_unique + draw(st.integers(0, 9))
    bag_start = np.concatenate([[0], np.cumsum(bags_per_feature)]).astype(np.int64)
    gap = draw(st.integers(0, 3))
    if draw(st.booleans()):  # side by side, as in a KeyedTensor of the widest feature's bags
        out_offset = np.arange(features) * (dim + gap)
        out_stride = np.full(features, features * (dim + gap))
        size = int(max(bags_per_feature.max(), 1)) * features * (dim + gap)
    else:
        out_offset = bag_start[:-1] * (dim + gap)
        out_stride = np.full(features, dim + gap)
        size = int(bag_start[-1]) * (dim + gap)
    batch = Batch(
        slots=rng.permutation(num_slots)[:num_unique].astype(np.int32),
        inverse=inverse,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        bag_start=bag_start,
        out_offset=out_offset.astype(np.int64),
        out_stride=out_stride.astype(np.int64),
        modes=rng.integers(0, 3, features).astype(np.uint8),
        weights=rng.standard_normal(n).astype(np.float32) if draw(st.booleans()) else None,
    )
    batch.csr = core.build_csr(inverse, num_unique)
    return rng, dim, num_slots, batch, size


def of(rows: np.ndarray) -> core.HostRows:
    return core.HostRows.view(rows.view(np.uint8))


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal, also in the signs of zeros; NaNs may differ in payload."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    keep = ~np.isnan(a)
    np.testing.assert_array_equal(a[keep].view(np.uint32), b[keep].view(np.uint32))


steps = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    lr=st.sampled_from([0.1, 0.003]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.02]),
    weight_decay_mode=st.integers(0, 2),
    step=st.one_of(st.just(1), st.integers(1, 2000)),
    keep_missed=st.sampled_from([None, None, 0.9, 0.999]),
    clip=st.sampled_from([None, None, (0.5, np.inf), (np.inf, 0.3), (1.0, 0.8), (100.0, 100.0)]),
)
