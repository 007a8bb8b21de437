"""Lookups and updates give the same bits as the NumPy oracle, for any slots, threads and instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.kernel_batches import address, batches, counted_batch, make_rows, of, same_bits, steps
from tests.kernels.kernel_oracle import (
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


def use(machine: tuple[str, int]) -> None:
    core.force_isa(machine[0])
    core.set_num_threads(machine[1])


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


@pytest.mark.parametrize("counts", [(255, 256, 257), (1023, 1024, 1025), (1, 5000, 2, 2048, 0)])
def test_hot_rows_are_summed_in_fixed_pieces(counts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    dim, step = 20, Step(kind=1)
    batch = counted_batch(rng, counts)
    before = make_rows(rng, len(counts), dim + 1, special=False)
    before[:, dim] = 0
    grad = rng.standard_normal((len(batch.inverse), dim)).astype(np.float32)
    expected = before.copy()
    update(expected, dim, batch, grad, step, False)
    for isa in core.supported_isas():
        for threads in (1, 2, 4):
            use((isa, threads))
            rows = before.copy()
            batch.csr = core.build_csr(batch.inverse, len(counts))
            of(rows).update_rows(batch.update_args(dim, step), grad.ctypes.data, dim)
            same_bits(rows, expected)
