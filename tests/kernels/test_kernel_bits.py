"""Lookups and updates give the same bits as the NumPy oracle, for any slots, threads and instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.kernel_oracle import (
    Batch,
    Step,
    lookup_pooled,
    position_grads,
    update,
    weight_grads,
)
from tierstore import _core as core

MACHINES = [(isa, threads) for isa in core.supported_isas() for threads in (1, 3)]
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads = core.num_threads()
    yield
    core.force_isa("auto")
    core.set_num_threads(threads)


def make_rows(rng: np.random.Generator, num_slots: int, floats: int, special: bool) -> np.ndarray:
    width = -(-floats // 4) * 4
    rows = rng.standard_normal((num_slots, width)).astype(np.float32)
    if special:
        rows[rng.random(rows.shape) < 0.1] = 0.25  # ties for max
        rows[rng.random(rows.shape) < 0.02] = np.nan
    rows[:, floats:] = 0
    return rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.random.Generator, int, int, Batch, int]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dim = draw(
        st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 63, 64, 65, 100, 127, 128, 129, 150, 300]))
    )
    features = draw(st.integers(1, 4))
    bags_per_feature = rng.integers(0, 6, features)
    lengths = rng.integers(0, draw(st.integers(1, 12)), bags_per_feature.sum())
    n = int(lengths.sum())
    num_unique = draw(st.integers(1, 12))
    inverse = rng.integers(-1 if draw(st.booleans()) else 0, num_unique, n).astype(np.int32)
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


def use(machine: tuple[str, int]) -> None:
    core.force_isa(machine[0])
    core.set_num_threads(machine[1])


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal, also in the signs of zeros; NaNs may differ in payload."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    keep = ~np.isnan(a)
    np.testing.assert_array_equal(a[keep].view(np.uint32), b[keep].view(np.uint32))


@PROPERTY
@given(batches())
def test_lookup_pooled(case: tuple) -> None:
    rng, dim, num_slots, batch, size = case
    rows = make_rows(rng, num_slots, dim, special=True)
    expected = np.full(size, 7, np.float32)
    expected_argmax = lookup_pooled(rows, dim, batch, expected)
    is_max = batch.modes[[batch.feature(b) for b in range(batch.num_bags)]] == 2 if batch.num_bags else []
    for machine in MACHINES:
        use(machine)
        out = np.full(size, 7, np.float32)
        argmax = np.full((batch.num_bags, dim), -9, np.int32)
        of(rows).lookup_pooled(
            batch.lookup_args(dim), batch.bags, out.ctypes.data, address(batch.weights), argmax.ctypes.data
        )
        same_bits(out, expected)
        np.testing.assert_array_equal(argmax[is_max], expected_argmax[is_max])


@PROPERTY
@given(batches())
def test_weight_grads(case: tuple) -> None:
    rng, dim, num_slots, batch, size = case
    rows = make_rows(rng, num_slots, dim, special=False)
    grad = rng.standard_normal(size).astype(np.float32)
    expected = weight_grads(rows, dim, batch, grad)
    for machine in MACHINES:
        use(machine)
        out = np.full(len(batch.inverse), 7, np.float32)
        of(rows).weight_grads(batch.lookup_args(dim), batch.bags, grad.ctypes.data, out.ctypes.data)
        same_bits(out, expected)


steps = st.builds(
    Step,
    kind=st.integers(0, 3),
    lr=st.sampled_from([0.1, 0.003]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.02]),
    weight_decay_mode=st.integers(0, 2),
    step=st.integers(1, 2000),
)


@PROPERTY
@given(batches(), steps, st.booleans())
def test_update_pooled(case: tuple, step: Step, check_finite: bool) -> None:
    rng, dim, num_slots, batch, size = case
    floats = dim + step.state_floats(dim)
    before = make_rows(rng, num_slots, floats, special=False)
    before[:, dim:] = np.abs(before[:, dim:])
    out = np.zeros(size, np.float32)
    argmax = lookup_pooled(before, dim, batch, out)
    grad = rng.standard_normal(size).astype(np.float32)
    if check_finite:
        grad[rng.random(size) < 0.01] = np.inf
    expected = before.copy()
    shares = position_grads(dim, batch, argmax, grad)
    rejected = update(expected, dim, batch, shares, step, check_finite)
    for machine in MACHINES:
        use(machine)
        rows = before.copy()
        got = of(rows).update_pooled(
            batch.update_args(dim, step, check_finite), batch.bags, grad.ctypes.data,
            address(batch.weights), argmax.ctypes.data,
        )  # fmt: skip
        same_bits(rows, expected)
        assert got.tolist() == rejected


@PROPERTY
@given(batches(), steps)
def test_sequence_lookup_and_update(case: tuple, step: Step) -> None:
    rng, dim, num_slots, batch, _ = case
    before = make_rows(rng, num_slots, dim + step.state_floats(dim), special=False)
    before[:, dim:] = np.abs(before[:, dim:])
    n, stride = len(batch.inverse), dim + 3
    looked_up = np.zeros((n, stride), np.float32)
    for p in np.flatnonzero(batch.inverse >= 0):
        looked_up[p, :dim] = before[batch.slots[batch.inverse[p]], :dim]
    grad = rng.standard_normal((n, stride)).astype(np.float32)
    expected = before.copy()
    update(expected, dim, batch, grad[:, :dim], step, False)
    for machine in MACHINES:
        use(machine)
        rows = before.copy()
        out = np.zeros((n, stride), np.float32)
        of(rows).lookup_rows(batch.lookup_args(dim), out.ctypes.data, stride)
        same_bits(out, looked_up)
        of(rows).update_rows(batch.update_args(dim, step), grad.ctypes.data, stride)
        same_bits(rows, expected)


@pytest.mark.parametrize("counts", [(1023, 1024, 1025), (1, 5000, 2, 2048, 0)])
def test_hot_rows_are_summed_in_fixed_pieces(counts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    dim, step = 20, Step(kind=1)
    inverse = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    batch = Batch(
        slots=np.arange(len(counts), dtype=np.int32)[::-1].copy(), inverse=inverse, offsets=np.empty(0),
        bag_start=np.empty(0), out_offset=np.empty(0), out_stride=np.empty(0), modes=np.empty(0),
    )  # fmt: skip
    before = make_rows(rng, len(counts), dim + 1, special=False)
    before[:, dim] = 0
    grad = rng.standard_normal((len(inverse), dim)).astype(np.float32)
    expected = before.copy()
    update(expected, dim, batch, grad, step, False)
    for isa in core.supported_isas():
        for threads in (1, 2, 4):
            use((isa, threads))
            rows = before.copy()
            batch.csr = core.build_csr(inverse, len(counts))
            of(rows).update_rows(batch.update_args(dim, step), grad.ctypes.data, dim)
            same_bits(rows, expected)
