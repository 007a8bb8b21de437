"""GPU kernels in the emulator have the bits of the CPU kernels, and touch what they may touch only."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda.emulated import DIMS, Launch, aligned, hot_rows, library, vec_of
from tests.cuda.fake import fake_gpu
from tests.kernels.kernel_batches import address, batches, counted_batch, make_rows, of, same_bits, steps
from tests.kernels.kernel_oracle import PARTIAL_ADAM, Batch, Step
from tierstore import _core as core
from tierstore.cuda.args import (
    MISSED_FIELDS,
    STEP_FIELDS,
    STRUCTS,
    BagShare,
    BagSharesArgs,
    GradsArgs,
    InitRowsArgs,
    LookupPooledArgs,
    LookupRowsArgs,
    MovedRows,
    MoveRowsArgs,
    RoundingArgs,
    RowsArgs,
    StepArgs,
    UpdateArgs,
    WeightGradsArgs,
)

PROPERTY = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32)
some_batches = st.one_of(batches(st.sampled_from(DIMS), longest) for longest in (1, 11))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_arguments_have_the_layout_of_the_source(struct: type[ctypes.Structure]) -> None:
    assert ctypes.sizeof(struct) == library().size_of(struct.__name__.encode())


def moved(
    launch: Launch, name: str, parts: list[np.ndarray], slots: np.ndarray | None, head: int
) -> ctypes.Structure:
    """Rows in one array, of which ``head`` floats are moved first, or in two that are cut there."""
    at = [launch.array(f"{name} {i}", part, writable=name == "target") for i, part in enumerate(parts)]
    tail = at[1] if len(at) == 2 else (at[0] or 0) + 4 * head
    floats = [part.shape[1] for part in parts]
    return MovedRows(at[0], floats[0], tail, floats[-1], launch.array(f"slots of the {name}", slots))


@PROPERTY
@given(SEEDS, st.integers(1, 40), st.integers(1, 4))
def test_moves_between_arenas(seed: int, n: int, words: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.standard_normal((n + 3, 4 * (words + 1))).astype(np.float32)
    for with_from, with_to, head in itertools.product((True, False), (True, False), range(1, words + 1)):
        target = np.zeros((n + 5, 4 * (words + 2)), np.float32)
        take = rng.permutation(n + 3)[:n].astype(np.int32) if with_from else None
        put = rng.permutation(n + 5)[:n].astype(np.int32) if with_to else None
        launch = Launch(seed)
        from_parts, to_parts = (
            [aligned(part) for part in np.split(rows, [4 * head] if rng.random() < 0.5 else [], axis=1)]
            for rows in (source, target)
        )
        args = MoveRowsArgs(
            moved(launch, "source", from_parts, take, 4 * head),
            moved(launch, "target", to_parts, put, 4 * head),
            n,
            words,
            head,
        )
        launch("move_rows", args, of_layout=False)
        expected = np.zeros_like(target)
        at = np.arange(n) if put is None else put
        expected[at, : 4 * words] = source[np.arange(n) if take is None else take, : 4 * words]
        np.testing.assert_array_equal(np.concatenate(to_parts, axis=1), expected)


@PROPERTY
@given(some_batches, SEEDS)
def test_lookup_pooled(case: tuple, seed: int) -> None:
    rng, dim, num_slots, batch, size = case
    rows = make_rows(rng, num_slots, dim, special=True)
    expected, out = np.full(size, 7, np.float32), np.full(size, 7, np.float32)
    expected_argmax = np.full((batch.num_bags, dim), -9, np.int32)
    argmax = expected_argmax.copy()
    of(rows).lookup_pooled(
        batch.lookup_args(dim),
        batch.bags,
        expected.ctypes.data,
        address(batch.weights),
        expected_argmax.ctypes.data,
    )
    launch = Launch(seed, (dim, vec_of(dim, batch.out_offset, batch.out_stride)))
    args = LookupPooledArgs(
        launch.gather(rows, batch),
        launch.bags(batch),
        launch.array("weights", batch.weights),
        launch.array("out", out, writable=True),
        launch.array("argmax", argmax, writable=True),
        seed % 2,
        0,
    )
    launch("lookup_pooled", args)
    same_bits(out, expected)
    np.testing.assert_array_equal(argmax, expected_argmax)


@PROPERTY
@given(some_batches, SEEDS)
def test_weight_grads(case: tuple, seed: int) -> None:
    rng, dim, num_slots, batch, size = case
    rows = make_rows(rng, num_slots, dim, special=False)
    grad = rng.standard_normal(size).astype(np.float32)
    expected = np.full(len(batch.inverse), 7, np.float32)
    out = expected.copy()
    of(rows).weight_grads(batch.lookup_args(dim), batch.bags, grad.ctypes.data, expected.ctypes.data)
    launch = Launch(seed, (dim, vec_of(dim, batch.out_offset, batch.out_stride)))
    args = WeightGradsArgs(
        launch.gather(rows, batch),
        launch.bags(batch),
        launch.array("grad", grad),
        launch.array("out", out, writable=True),
    )
    launch("weight_grads", args)
    same_bits(out, expected)


def _step_args(step: Step) -> ctypes.Structure:
    made = step.native()
    return StepArgs(**{name: getattr(made, name) for name in (*STEP_FIELDS, *MISSED_FIELDS)})


def updated(
    launch: Launch,
    rows: np.ndarray,
    dim: int,
    batch: Batch,
    grads: ctypes.Structure,
    step: Step,
    check_finite: bool = False,
    squares: np.ndarray | None = None,
    means: np.ndarray | None = None,
    rounding: core.UpdateRounding | None = None,
) -> list[int]:
    """Update ``rows`` by the kernels; return the unique rows that were rejected."""
    start, positions = batch.csr
    hot, pieces, num_long = hot_rows(start)
    rejected = np.zeros(len(batch.slots), np.uint8)
    partials = np.full((int(pieces[-1]), dim), np.nan, np.float32)
    dice = [rounding and getattr(rounding, name) for name in ("keys", "seeds", "columns")]
    args = UpdateArgs(
        launch.rows(rows, dim, writable=True),
        launch.array("slots", batch.slots),
        len(batch.slots),
        launch.array("csr_start", start),
        launch.array("csr_positions", positions),
        grads,
        _step_args(step),
        RoundingArgs(*(launch.array(f"dice {i}", array) for i, array in enumerate(dice))),
        check_finite,
        num_long,
        launch.array("rejected", rejected, writable=True),
        launch.array("squares", squares, writable=True),
        launch.array("means", means),
        launch.array("hot", hot),
        launch.array("hot_piece", pieces),
        len(pieces) - 1,
        launch.array("partials", partials, writable=True),
    )
    cold = "update_singles" if launch.seed % 2 else "update_cold"
    for kernel in (cold, "update_pieces", "update_hot"):
        launch(kernel, args)
    return np.flatnonzero(rejected).tolist()


def pooled_grads(
    launch: Launch, dim: int, batch: Batch, grad: np.ndarray, argmax: np.ndarray
) -> ctypes.Structure:
    shares = np.zeros((batch.num_bags, ctypes.sizeof(BagShare)), np.uint8)
    bag_of = np.full(len(batch.inverse), -1, np.int32)
    bags = launch.bags(batch)
    args = BagSharesArgs(
        bags,
        dim,
        launch.array("inverse", batch.inverse),
        launch.array("shares", shares, writable=True),
        launch.array("bag_of", bag_of, writable=True),
    )
    launch("bag_shares", args, of_layout=False)
    return GradsArgs(
        launch.array("grad", grad),
        0,
        shares.ctypes.data,
        bag_of.ctypes.data,
        launch.array("weights", batch.weights),
        launch.array("argmax", argmax),
    )


@PROPERTY
@given(some_batches, steps, st.booleans(), SEEDS)
def test_update_pooled(case: tuple, step: Step, check_finite: bool, seed: int) -> None:
    rng, dim, num_slots, batch, size = case
    before = make_rows(rng, num_slots, dim + step.state_floats(dim), special=False)
    before[:, dim:] = np.abs(before[:, dim:])
    out, argmax = np.zeros(size, np.float32), np.full((batch.num_bags, dim), -1, np.int32)
    of(before).lookup_pooled(
        batch.lookup_args(dim), batch.bags, out.ctypes.data, address(batch.weights), argmax.ctypes.data
    )
    grad = rng.standard_normal(size).astype(np.float32)
    if check_finite:
        grad[rng.random(size) < 0.01] = np.inf
    expected, rows = before.copy(), before.copy()
    rejected = of(expected).update_pooled(
        batch.update_args(dim, step, check_finite), batch.bags, grad.ctypes.data,
        address(batch.weights), argmax.ctypes.data,
    )  # fmt: skip
    launch = Launch(seed, (dim, vec_of(dim, batch.out_offset, batch.out_stride)), step.kind)
    grads = pooled_grads(launch, dim, batch, grad, argmax)
    assert updated(launch, rows, dim, batch, grads, step, check_finite) == rejected.tolist()
    same_bits(rows, expected)


@PROPERTY
@given(some_batches, steps, st.integers(0, 4), SEEDS)
def test_sequence_lookup_and_update(case: tuple, step: Step, gap: int, seed: int) -> None:
    rng, dim, num_slots, batch, _ = case
    before = make_rows(rng, num_slots, dim + step.state_floats(dim), special=False)
    before[:, dim:] = np.abs(before[:, dim:])
    n, stride = len(batch.inverse), dim + gap
    expected_out, out = np.zeros((n, stride), np.float32), np.zeros((n, stride), np.float32)
    of(before).lookup_rows(batch.lookup_args(dim), expected_out.ctypes.data, stride)
    launch = Launch(seed, (dim, vec_of(dim, stride)), step.kind)
    args = LookupRowsArgs(launch.gather(before, batch), n, launch.array("out", out, writable=True), stride)
    launch("lookup_rows", args)
    same_bits(out, expected_out)

    grad = rng.standard_normal((n, stride)).astype(np.float32)
    expected, rows = before.copy(), before.copy()
    of(expected).update_rows(batch.update_args(dim, step), grad.ctypes.data, stride)
    grads = GradsArgs(launch.array("grad", grad), stride, None, None, None, None)
    assert updated(launch, rows, dim, batch, grads, step) == []
    same_bits(rows, expected)


@pytest.mark.parametrize("dim", [3, 20, 64])
@pytest.mark.parametrize("counts", [(255, 256, 257), (1, 1300, 2, 512, 0, 513), (31, 1, 32, 33, 0, 40)])
@pytest.mark.parametrize("kind", [1, 3, 7, 9])
@pytest.mark.parametrize("seed", [6, 7])  # which chooses the kernel of other rows
def test_hot_rows_are_summed_in_fixed_pieces(dim: int, counts: tuple[int, ...], kind: int, seed: int) -> None:
    rng, step = np.random.default_rng(dim), Step(kind=kind)
    batch = counted_batch(rng, counts)
    before = make_rows(rng, len(counts), dim + step.state_floats(dim), special=False)
    before[:, dim:] = np.abs(before[:, dim:])
    grad = rng.standard_normal((len(batch.inverse), dim)).astype(np.float32)
    expected, rows = before.copy(), before.copy()
    of(expected).update_rows(batch.update_args(dim, step), grad.ctypes.data, dim)
    launch = Launch(seed, (dim, vec_of(dim)), kind)
    grads = GradsArgs(launch.array("grad", grad), dim, None, None, None, None)
    updated(launch, rows, dim, batch, grads, step)
    same_bits(rows, expected)


@PROPERTY
@given(some_batches, st.sampled_from([0.0, 0.02]), st.sampled_from([1, PARTIAL_ADAM]), SEEDS)
def test_rows_that_are_cut_by_columns(case: tuple, decay: float, kind: int, seed: int) -> None:
    """The squares of these columns alone, then an update by the mean over all columns."""
    rng, dim, num_slots, batch, _ = case
    step = Step(kind=kind, weight_decay=decay, weight_decay_mode=1)
    before = np.abs(make_rows(rng, num_slots, dim + step.state_floats(dim), special=False))
    n = len(batch.inverse)
    grad = rng.standard_normal((n, dim)).astype(np.float32)
    grad[rng.random((n, dim)) < 0.01] = np.inf
    start, positions = batch.csr

    def cpu(rows: np.ndarray, **cut: np.ndarray) -> list[int]:
        args = core.UpdateArgs(
            dim=dim, slots=batch.slots, csr_start=start, csr_positions=positions,
            step=step.native(), check_finite=True, **cut,
        )  # fmt: skip
        return of(rows).update_rows(args, grad.ctypes.data, dim).tolist()

    launch = Launch(seed, (dim, vec_of(dim)), kind)
    grads = GradsArgs(launch.array("grad", grad), dim, None, None, None, None)
    squares = np.zeros(len(batch.slots), np.float32)
    expected_squares, rows = squares.copy(), before.copy()
    cpu(rows, squares=expected_squares)
    updated(launch, rows, dim, batch, grads, step, True, squares=squares)
    same_bits(squares, expected_squares)
    np.testing.assert_array_equal(rows, before)

    means = np.where(rng.random(len(squares)) < 0.2, np.nan, rng.random(len(squares))).astype(np.float32)
    expected = before.copy()
    rejected = cpu(expected, means=means)
    assert updated(launch, rows, dim, batch, grads, step, True, means=means) == rejected
    same_bits(rows, expected)


@PROPERTY
@given(
    st.integers(1, 70),
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(-10, 10, width=32), st.floats(0, 4, width=32)),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    SEEDS,
)
def test_initial_values(dim: int, tables: list, cut: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds, first, span = (np.array(x) for x in zip(*tables, strict=True))
    first = first.astype(np.float32)
    second = (first + span.astype(np.float32)).astype(np.float32)
    keys = rng.integers(0, 2**48, 9, dtype=np.uint64) | (
        rng.integers(0, len(tables), 9, dtype=np.uint64) << np.uint64(48)
    )
    slots = rng.permutation(12)[:9].astype(np.int32)
    seeds = rng.integers(0, 2**64, len(tables), dtype=np.uint64)
    columns = rng.integers(0, 40, len(tables)) if cut else None
    state = int(rng.integers(0, 9))
    expected = np.full((12, -(-(dim + state) // 4) * 4), 77, np.float32)
    rows = expected.copy()
    values = core.InitialValues(
        dim=dim, state_floats=state, state_value=0.5, kinds=kinds.astype(np.uint8), first=first,
        second=second, seeds=seeds, columns=columns,
    )  # fmt: skip
    of(expected).initialise(values, slots, keys)
    launch = Launch(seed)
    args = InitRowsArgs(
        launch.rows(rows, dim, writable=True), launch.array("slots", slots), launch.array("keys", keys),
        len(keys), dim, state, rows.shape[1] - dim, 0.5, 0,
        launch.array("kinds", kinds.astype(np.uint8)), launch.array("first", first),
        launch.array("second", second), launch.array("seeds", seeds), launch.array("columns", columns),
    )  # fmt: skip
    launch("init_rows", args, of_layout=False)
    same_bits(rows, expected)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (0, "another thread writes"),
        (1, "outside of every array"),
        (2, "read-only slots"),
        (3, "16 of a warp's threads make a shuffle"),
        (4, "not aligned to 16"),
        (5, "which another thread"),
        (6, ""),
        (7, "which another thread writes"),
        (8, ""),
    ],
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a fake driver"])
def test_the_emulator_finds_faults(number: int, error: str, beside: bool) -> None:
    """A checker that finds nothing wrong proves nothing until it has found something. The fake driver has an
    emulator of its own, which may let kernels access what this one must not."""
    if beside:
        fake_gpu().begin()
        fake_gpu().set_pageable()
    out, slots = np.zeros(64 * 5 * 4, np.float32), np.full(512 * 3, 1 << 20, np.int32)
    launch = Launch(number)
    args = LookupRowsArgs()
    args.gather.slots = launch.array("slots", slots)
    args.n, args.out = number, launch.array("out", out, writable=True)
    found = launch.run("faulty", args, of_layout=False)
    assert error in found
    assert bool(found) == bool(error)


def test_a_row_that_two_threads_write_is_found() -> None:
    """Slots must not repeat; the emulator sees the race when they do."""
    rows, source = np.zeros((4, 4), np.float32), np.ones((2, 4), np.float32)
    launch = Launch(0)
    twice = np.array([2, 2, 0, 0], np.int32)[:2].copy()
    args = MoveRowsArgs(
        moved(launch, "source", [source], None, 4), moved(launch, "target", [rows], twice, 4), 2, 1, 1
    )
    assert "target 0 at byte 32, which another thread writes" in launch.run(
        "move_rows", args, of_layout=False
    )


def test_unused_structs_are_whole() -> None:
    assert ctypes.sizeof(RowsArgs) == 32
    assert ctypes.sizeof(MovedRows) == 40
    assert ctypes.sizeof(StepArgs) == 72
