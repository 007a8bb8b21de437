"""Kernels on rows of 16-bit weights: the float32 kernels' numbers, rounded where rows are written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.kernel_oracle import Batch, Step, lookup_pooled, philox_of, position_grads, update
from tests.kernels.kernel_oracle import weight_grads as oracle_weight_grads
from tests.kernels.row_format_oracle import short
from tests.kernels.test_kernel_bits import MACHINES, PROPERTY, address, batches, same_bits, steps, use
from tierstore import _core as core
from tierstore.keys import make_keys
from tierstore.row_format import RowFormat

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEEDS = np.array([7, 2**63 + 5], np.uint64)
dtypes = st.sampled_from(sorted(TORCH))


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads = core.num_threads()
    yield
    core.force_isa("auto")
    core.set_num_threads(threads)


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers that torch knows, the largest one for finite numbers beyond it: uint16."""
    largest = torch.finfo(TORCH[dtype]).max
    found = torch.from_numpy(values)
    kept = torch.where(found.isfinite(), found.clamp(-largest, largest), found).to(TORCH[dtype])
    return kept.view(torch.int16).numpy().view(np.uint16)


def widened(bits: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16)).view(TORCH[dtype]).float().numpy()


def packed(wide: np.ndarray, dim: int, state: int, dtype: str) -> np.ndarray:
    """Rows of 16-bit weights (the nearest to those of ``wide``) and float32 state: uint8 (n, row_bytes)."""
    rows = np.zeros((len(wide), RowFormat(dtype).row_bytes(dim, state)), np.uint8)
    rows[:, : 2 * dim] = narrowed(wide[:, :dim], dtype).view(np.uint8)
    begin = (2 * dim + 3) // 4 * 4
    rows[:, begin : begin + 4 * state] = np.ascontiguousarray(wide[:, dim : dim + state]).view(np.uint8)
    return rows


def unpacked(rows: np.ndarray, dim: int, state: int, dtype: str) -> np.ndarray:
    begin = (2 * dim + 3) // 4 * 4
    weights = widened(np.ascontiguousarray(rows[:, : 2 * dim]).view(np.uint16), dtype)
    floats = np.ascontiguousarray(rows[:, begin : begin + 4 * state]).view(np.float32)
    assert not rows[:, 2 * dim : begin].any()
    assert not rows[:, begin + 4 * state :].any()
    return np.concatenate([weights, floats], axis=1)


def some_rows(rng: np.random.Generator, slots: int, dim: int, state: int, dtype: str) -> np.ndarray:
    wide = rng.standard_normal((slots, dim + state)).astype(np.float32)
    wide[:, dim:] = np.abs(wide[:, dim:])
    wide[rng.random(wide.shape) < 0.1] = 0.25  # ties for max
    wide[rng.random(wide.shape) < 0.05] *= np.float32(2.0**-20)  # subnormal in fp16
    return packed(wide, dim, state, dtype)


@PROPERTY
@given(batches(), dtypes, st.booleans())
def test_lookups_give_the_bits_of_float32_rows(case: tuple, dtype: str, flush: bool) -> None:
    rng, dim, num_slots, batch, size = case
    rows = some_rows(rng, num_slots, dim, 0, dtype)
    wide = unpacked(rows, dim, 0, dtype)
    expected, grad = np.full(size, 7, np.float32), rng.standard_normal(size).astype(np.float32)
    expected_argmax = lookup_pooled(wide, dim, batch, expected)
    expected_grads = oracle_weight_grads(wide, dim, batch, grad)
    n = len(batch.inverse)
    sequence = np.zeros((n, dim), np.float32)
    used = batch.inverse >= 0
    sequence[used] = wide[batch.slots[batch.inverse[used]]]
    is_max = batch.modes[[batch.feature(b) for b in range(batch.num_bags)]] == 2 if batch.num_bags else []
    torch.set_flush_denormal(flush)
    try:
        for machine in MACHINES:
            use(machine)
            view, args = core.HostRows.view(rows, dtype), batch.lookup_args(dim)
            out, argmax = np.full(size, 7, np.float32), np.full((batch.num_bags, dim), -9, np.int32)
            view.lookup_pooled(args, batch.bags, out.ctypes.data, address(batch.weights), argmax.ctypes.data)
            same_bits(out, expected)
            np.testing.assert_array_equal(argmax[is_max], expected_argmax[is_max])
            found = np.full((n, dim), 7, np.float32)
            view.lookup_rows(args, found.ctypes.data, dim)
            same_bits(found, sequence)
            grads = np.full(n, 7, np.float32)
            view.weight_grads(args, batch.bags, grad.ctypes.data, grads.ctypes.data)
            same_bits(grads, expected_grads)
    finally:
        torch.set_flush_denormal(False)


def dice_of(key_id: int, seed: int, columns: range, step: int) -> np.ndarray:
    """The 16 random bits of each column, as csrc/kernels/update.h says."""
    every = np.arange(columns.stop + 8) // 8 * 8
    blocks = np.unique(every) // 8
    fixed = [np.full(len(blocks), value) for value in (key_id & 0xFFFFFFFF, key_id >> 32)]
    words = philox_of([*fixed, blocks, np.full(len(blocks), 2 * step & 0xFFFFFFFF)], seed)
    return np.concatenate([words & 0xFFFF, words >> 16], axis=1).reshape(-1)[columns.start : columns.stop]


@PROPERTY
@given(batches(), steps, dtypes, st.booleans(), st.booleans(), st.integers(0, 40))
def test_updates_are_those_of_float32_rows_rounded(
    case: tuple, step: Step, dtype: str, stochastic: bool, check_finite: bool, column: int
) -> None:
    rng, dim, num_slots, batch, size = case
    state = step.state_floats(dim)
    before = some_rows(rng, num_slots, dim, state, dtype)
    wide = unpacked(before, dim, state, dtype)
    argmax = lookup_pooled(wide, dim, batch, np.zeros(size, np.float32))
    grad = rng.standard_normal(size).astype(np.float32)
    grad[rng.random(size) < 0.02] = 1e6  # beyond fp16
    if check_finite:
        grad[rng.random(size) < 0.01] = np.inf
    rejected = update(wide, dim, batch, position_grads(dim, batch, argmax, grad), step, check_finite)
    ids = rng.integers(0, 2**48, len(batch.slots))
    tables = rng.integers(0, 2, len(batch.slots))
    columns = np.array([0, column], np.int64)
    expected, rounding = packed(wide, dim, state, dtype), None
    counts = np.diff(batch.csr[0])
    if stochastic:
        rounding = core.UpdateRounding(
            keys=np.concatenate([make_keys(t, np.array([i])) for t, i in zip(tables, ids, strict=True)]),
            seeds=SEEDS,
            columns=columns,
        )
        for u in [u for u in range(len(ids)) if counts[u] and u not in rejected]:
            first = int(columns[tables[u]])
            dice = dice_of(int(ids[u]), int(SEEDS[tables[u]]), range(first, first + dim), step.step)
            row = wide[batch.slots[u], :dim]
            exact = [short(float(x), dtype, int(d)) for x, d in zip(row, dice, strict=True)]
            expected[batch.slots[u], : 2 * dim] = narrowed(np.array(exact, np.float32), dtype).view(np.uint8)
    for machine in MACHINES:
        use(machine)
        rows = before.copy()
        got = core.HostRows.view(rows, dtype).update_pooled(
            batch.update_args(dim, step, check_finite), batch.bags, grad.ctypes.data,
            address(batch.weights), argmax.ctypes.data, rounding,
        )  # fmt: skip
        assert got.tolist() == rejected
        found, wanted = unpacked(rows, dim, state, dtype), unpacked(expected, dim, state, dtype)
        same_bits(found, wanted)


@pytest.mark.parametrize("count", [255, 256, 257, 600])
@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_hot_rows_are_rounded_once(dtype: str, count: int) -> None:
    rng, dim, step = np.random.default_rng(count), 20, Step(kind=1, step=3)
    inverse = np.zeros(count, np.int32)
    batch = Batch(
        slots=np.zeros(1, np.int32), inverse=inverse, offsets=np.empty(0), bag_start=np.empty(0),
        out_offset=np.empty(0), out_stride=np.empty(0), modes=np.empty(0),
    )  # fmt: skip
    batch.csr = core.build_csr(inverse, 1)
    before = some_rows(rng, 1, dim, 1, dtype)
    wide, grad = unpacked(before, dim, 1, dtype), rng.standard_normal((count, dim)).astype(np.float32)
    update(wide, dim, batch, grad, step, False)
    for machine in MACHINES:
        use(machine)
        rows = before.copy()
        core.HostRows.view(rows, dtype).update_rows(batch.update_args(dim, step), grad.ctypes.data, dim)
        np.testing.assert_array_equal(rows, packed(wide, dim, 1, dtype))


@pytest.mark.parametrize("dtype", sorted(TORCH))
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 130])
def test_initial_rows_are_the_nearest_to_float32(dtype: str, dim: int) -> None:
    keys = make_keys(0, np.array([0, 3, 2**47]))
    values = core.InitialValues(
        dim=dim, state_floats=2, state_value=0.3, kinds=np.array([2], np.uint8),
        first=np.zeros(1, np.float32), second=np.ones(1, np.float32), seeds=SEEDS[:1],
    )  # fmt: skip
    wide = np.zeros((3, RowFormat().row_bytes(dim, 2)), np.uint8)
    core.HostRows.view(wide).initialise(values, None, keys)
    for machine in MACHINES:
        use(machine)
        rows = np.full((3, RowFormat(dtype).row_bytes(dim, 2)), 77, np.uint8)
        core.HostRows.view(rows, dtype).initialise(values, None, keys)
        np.testing.assert_array_equal(rows, packed(wide.view(np.float32), dim, 2, dtype))


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_every_number_of_16_bits_is_read_as_it_is(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    slots = np.arange(len(bits), dtype=np.int32)
    args = core.LookupArgs(dim=64, slots=slots, inverse=slots)
    for isa in core.supported_isas():
        use((isa, 1))
        out = np.zeros(bits.shape, np.float32)
        core.HostRows.view(bits.view(np.uint8).copy(), dtype).lookup_rows(args, out.ctypes.data, 64)
        same_bits(out, widened(bits, dtype))


def test_equal_updates_add_up_on_average() -> None:
    """Each step is a sixteenth of the distance of two numbers of bfloat16, which nearest rounding loses."""
    dim, steps_, rows = 512, 64, np.zeros((1, 1024), np.uint8)
    rows.view(np.uint16)[:] = narrowed(np.ones(1, np.float32), "bf16")
    inverse, grad = np.zeros(1, np.int32), np.full((1, dim), -1, np.float32)
    start, positions = core.build_csr(inverse, 1)
    keys = make_keys(0, np.array([5]))
    for number in range(1, steps_ + 1):
        step = core.OptimizerStep(kind=0, lr=2.0**-11, step=number)
        args = core.UpdateArgs(dim=dim, slots=inverse, csr_start=start, csr_positions=positions, step=step)
        rounding = core.UpdateRounding(keys=keys, seeds=SEEDS)
        core.HostRows.view(rows, "bf16").update_rows(args, grad.ctypes.data, dim, rounding)
    grown = widened(rows.view(np.uint16), "bf16") - 1
    assert abs(grown.mean() - steps_ * 2.0**-11) < 0.05 * steps_ * 2.0**-11
    assert len(np.unique(grown)) > 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: core.HostRows(4, 32, "int8"), "do not work on int8"),
        (lambda: core.HostRows(4, 32, "fp8"), "weights must be"),
        (lambda: core.HostRows.view(np.zeros((2, 32), np.uint8), "half"), "weights must be"),
        (lambda: core.UpdateRounding(keys=make_keys(2, np.arange(1)), seeds=SEEDS), "no entry in seeds"),
        (
            lambda: core.UpdateRounding(
                keys=make_keys(0, np.arange(1)), seeds=SEEDS, columns=np.zeros(1, np.int64)
            ),
            "differ in length",
        ),
        (
            lambda: core.UpdateRounding(
                keys=make_keys(0, np.arange(1)), seeds=SEEDS[:1], columns=np.array([-1])
            ),
            "at least 0",
        ),
    ],
)
def test_arguments_that_do_not_fit(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_rows_that_are_too_small_and_rounding_of_other_rows() -> None:
    rows = core.HostRows.view(np.zeros((2, 32), np.uint8), "bf16")
    slots = np.zeros(1, np.int32)
    start, positions = core.build_csr(slots, 1)
    grad = np.zeros((1, 16), np.float32)
    step = core.OptimizerStep(kind=1, lr=0.1)

    def args(dim: int) -> core.UpdateArgs:
        return core.UpdateArgs(dim=dim, slots=slots, csr_start=start, csr_positions=positions, step=step)

    rows.update_rows(args(14), grad.ctypes.data, 16)
    with pytest.raises(ValueError, match="row_bytes is smaller"):
        rows.update_rows(args(15), grad.ctypes.data, 16)
    rounding = core.UpdateRounding(keys=make_keys(0, np.arange(2)), seeds=SEEDS)
    with pytest.raises(ValueError, match="keys and slots differ"):
        rows.update_rows(args(8), grad.ctypes.data, 16, rounding)
    codec = core.RowCodec(weights="bf16", state="fp32", dim=8, state_floats=0)
    with pytest.raises(ValueError, match="only rows with float32 weights"):
        rows.encode(codec, make_keys(0, np.arange(2)), np.zeros((2, 16), np.uint8))
