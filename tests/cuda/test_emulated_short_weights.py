"""GPU kernels on rows of 16-bit weights have the bits of the CPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cuda.emulated import DIMS_OF_16_BITS, Launch, vec_of
from tests.cuda.test_emulated_kernels import PROPERTY, SEEDS, pooled_grads, updated
from tests.kernels.kernel_batches import address, batches, counted_batch, rows_batch, same_bits, steps
from tests.kernels.kernel_oracle import KINDS, Step
from tests.kernels.test_short_weights import packed, some_rows, unpacked, widened
from tierstore import _core as core
from tierstore.cuda.args import (
    WEIGHTS,
    GradsArgs,
    InitRowsArgs,
    LookupPooledArgs,
    LookupRowsArgs,
    WeightGradsArgs,
)
from tierstore.keys import make_keys
from tierstore.row_format import RowFormat

DTYPES = ("bf16", "fp16")
SEEDS_OF_TABLES = np.array([7, 2**63 + 5], np.uint64)
some_batches = st.one_of(batches(st.sampled_from(DIMS_OF_16_BITS), longest) for longest in (1, 11))


def roundings(rng: np.random.Generator, slots: int, cut: bool) -> core.UpdateRounding:
    """Random bits for the rows of two tables; ``cut``: the second begins anywhere in a wider table."""
    tables, ids = rng.integers(0, 2, slots), rng.integers(0, 2**48, slots)
    keys = [make_keys(int(table), np.array([id])) for table, id in zip(tables, ids, strict=True)]
    columns = np.array([0, rng.integers(0, 40)]) if cut else None
    return core.UpdateRounding(keys=np.concatenate(keys), seeds=SEEDS_OF_TABLES, columns=columns)


def same_rows(rows: np.ndarray, expected: np.ndarray, dim: int, state: int, dtype: str) -> None:
    """Equal bits, and zeros behind the weights and the state."""
    same_bits(unpacked(rows, dim, state, dtype), unpacked(expected, dim, state, dtype))


@PROPERTY
@given(some_batches, st.sampled_from(DTYPES), SEEDS)
def test_lookups(case: tuple, dtype: str, seed: int) -> None:
    rng, dim, num_slots, batch, size = case
    rows = some_rows(rng, num_slots, dim, 0, dtype)
    host, args = core.HostRows.view(rows, dtype), batch.lookup_args(dim)
    grad = rng.standard_normal(size).astype(np.float32)
    n = len(batch.inverse)
    expected = [np.full(shape, 7, np.float32) for shape in (size, (n, dim), n)]
    found = [array.copy() for array in expected]
    argmax = [np.full((batch.num_bags, dim), -9, np.int32) for _ in range(2)]
    weights, at = address(batch.weights), [array.ctypes.data for array in (*expected, *argmax)]
    host.lookup_pooled(args, batch.bags, at[0], weights, at[3])
    host.lookup_rows(args, at[1], dim)
    host.weight_grads(args, batch.bags, grad.ctypes.data, at[2])

    launch = Launch(seed, (dim, vec_of(dim, batch.out_offset, batch.out_stride)), weights=dtype)
    gather, bags = launch.gather(rows, batch), launch.bags(batch)
    out, sequence, grads = (
        launch.array(name, array, writable=True)
        for name, array in zip(("out", "sequence", "grads"), found, strict=True)
    )
    pooled = LookupPooledArgs(
        gather, bags, launch.array("weights", batch.weights), out,
        launch.array("argmax", argmax[1], writable=True), seed % 2, 0,
    )  # fmt: skip
    launch("lookup_pooled", pooled)
    launch("lookup_rows", LookupRowsArgs(gather, n, sequence, dim))
    launch("weight_grads", WeightGradsArgs(gather, bags, launch.array("grad", grad), grads))
    for ours, theirs in zip(found, expected, strict=True):
        same_bits(ours, theirs)
    np.testing.assert_array_equal(argmax[1], argmax[0])


@PROPERTY
@given(
    some_batches, steps, st.sampled_from(DTYPES), st.sampled_from([None, False, True]), st.booleans(), SEEDS
)
def test_updates(
    case: tuple, step: Step, dtype: str, cut: bool | None, check_finite: bool, seed: int
) -> None:
    """``cut``: None rounds to the nearest value, else at random, whole tables or shards of columns."""
    rng, dim, num_slots, batch, size = case
    state = step.state_floats(dim)
    before = some_rows(rng, num_slots, dim, state, dtype)
    argmax = np.full((batch.num_bags, dim), -1, np.int32)
    out = np.zeros(size, np.float32)
    core.HostRows.view(before, dtype).lookup_pooled(
        batch.lookup_args(dim), batch.bags, out.ctypes.data, address(batch.weights), argmax.ctypes.data
    )
    grad = rng.standard_normal(size).astype(np.float32)
    grad[rng.random(size) < 0.02] = 1e6  # beyond fp16
    if check_finite:
        grad[rng.random(size) < 0.01] = np.inf
    rounding = None if cut is None else roundings(rng, len(batch.slots), cut)
    expected, rows = before.copy(), before.copy()
    rejected = core.HostRows.view(expected, dtype).update_pooled(
        batch.update_args(dim, step, check_finite), batch.bags, grad.ctypes.data,
        address(batch.weights), argmax.ctypes.data, rounding,
    )  # fmt: skip
    layout = dim, vec_of(dim, batch.out_offset, batch.out_stride)
    launch = Launch(seed, layout, step.kind, dtype)
    grads = pooled_grads(launch, dim, batch, grad, argmax)
    found = updated(launch, rows, dim, batch, grads, step, check_finite, rounding=rounding)
    assert found == rejected.tolist()
    same_rows(rows, expected, dim, state, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [3, 20, 64])
@pytest.mark.parametrize("seed", [6, 7])
def test_every_optimizer_rounds_hot_and_cold_rows(dim: int, dtype: str, kind: int, seed: int) -> None:
    """Rows of 1 to 1,300 positions, to the nearest value and at random, by each kernel for cold rows."""
    counts = (1, 1300, 2, 255, 256, 0, 257)
    rng, step = np.random.default_rng(dim + kind), Step(kind=kind, step=3)
    batch = counted_batch(rng, counts)
    state = step.state_floats(dim)
    before = some_rows(rng, len(counts), dim, state, dtype)
    grad = rng.standard_normal((len(batch.inverse), dim)).astype(np.float32)
    results = []
    for rounding in (None, roundings(rng, len(counts), cut=True)):
        expected, rows = before.copy(), before.copy()
        host = core.HostRows.view(expected, dtype)
        host.update_rows(batch.update_args(dim, step), grad.ctypes.data, dim, rounding)
        launch = Launch(seed, (dim, vec_of(dim)), kind, dtype)
        grads = GradsArgs(launch.array("grad", grad), dim, None, None, None, None)
        updated(launch, rows, dim, batch, grads, step, rounding=rounding)
        same_rows(rows, expected, dim, state, dtype)
        results.append(rows)
    assert not np.array_equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_is_read_as_it_is(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    at = np.arange(len(bits), dtype=np.int32)
    batch = rows_batch(at, at)
    out = np.zeros(bits.shape, np.float32)
    launch = Launch(0, (64, 4), weights=dtype)
    gather = launch.gather(bits, batch)
    launch("lookup_rows", LookupRowsArgs(gather, len(bits), launch.array("out", out, writable=True), 64))
    same_bits(out, widened(bits, dtype))


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_float_is_rounded_as_on_the_host(dtype: str, random: bool) -> None:
    """A step of rate 1 makes rows of zeros the negative gradient: here any bits, and those near limits."""
    dim, rng, step = 64, np.random.default_rng(3), Step(kind=0, lr=1.0, weight_decay=0.0)
    limits = np.array([0x38800000, 0x33000000, 0x477FE000, 0x477FF000, 0x7F7F8000, 0x7F800000, 0], np.uint32)
    near = (limits[:, None] + np.arange(-32, 32, dtype=np.int64)[None]).astype(np.uint32)
    bits = np.concatenate([near, near ^ np.uint32(1 << 31), rng.integers(0, 1 << 32, (250, dim), np.uint32)])
    grad, at = bits.view(np.float32), np.arange(len(bits), dtype=np.int32)
    batch = rows_batch(at, at)
    rounding = roundings(rng, len(at), cut=False) if random else None
    expected = packed(np.zeros((len(at), dim), np.float32), dim, 0, dtype)
    rows = expected.copy()
    host = core.HostRows.view(expected, dtype)
    host.update_rows(batch.update_args(dim, step), grad.ctypes.data, dim, rounding)
    launch = Launch(1, (dim, 4), 0, dtype)
    grads = GradsArgs(launch.array("grad", grad), dim, None, None, None, None)
    updated(launch, rows, dim, batch, grads, step, rounding=rounding)
    same_rows(rows, expected, dim, 0, dtype)
    assert len(np.unique(rows.view(np.uint16))) > 1_000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 130])
def test_initial_values(dim: int, cut: bool, dtype: str) -> None:
    rng, state = np.random.default_rng(dim), dim % 3
    keys = make_keys(0, rng.integers(0, 2**48, 9)) | (np.arange(9, dtype=np.uint64) % 3 << np.uint64(48))
    slots = rng.permutation(12)[:9].astype(np.int32)
    kinds, first = np.array([0, 1, 2], np.uint8), np.array([0.3, -1e5, 0], np.float32)
    second, seeds = np.array([0, 1e5, 1], np.float32), rng.integers(0, 2**64, 3, dtype=np.uint64)
    columns = rng.integers(0, 40, 3) if cut else None
    expected = np.full((12, RowFormat(dtype).row_bytes(dim, state)), 77, np.uint8)
    rows = expected.copy()
    values = core.InitialValues(
        dim=dim, state_floats=state, state_value=0.5, kinds=kinds, first=first, second=second, seeds=seeds,
        columns=columns,
    )  # fmt: skip
    core.HostRows.view(expected, dtype).initialise(values, slots, keys)
    launch = Launch(dim, weights=dtype)
    args = InitRowsArgs(
        launch.rows(rows, dim, writable=True), launch.array("slots", slots), launch.array("keys", keys),
        len(keys), dim, state, rows.shape[1] // 4 - (dim + 1) // 2, 0.5, WEIGHTS[dtype],
        launch.array("kinds", kinds), launch.array("first", first),
        launch.array("second", second), launch.array("seeds", seeds), launch.array("columns", columns),
    )  # fmt: skip
    launch("init_rows", args, of_layout=False)
    np.testing.assert_array_equal(rows, expected)
