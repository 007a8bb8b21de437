"""Rows in fewer bytes: the oracle's bits on every instruction set, and values that stay once rounded."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.row_format_oracle import Oracle
from tierstore import _core as core
from tierstore.keys import make_keys
from tierstore.row_format import STATE_BYTES, WEIGHT_BYTES, RowFormat

SEEDS = [2**63 + 12345, 7]
FORMATS = [RowFormat(*dtypes) for dtypes in product(WEIGHT_BYTES, STATE_BYTES)]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.weights}-{f.state}")
ways = pytest.mark.parametrize("seeds", [None, SEEDS], ids=["nearest", "stochastic"])


def codec(format: RowFormat, dim: int, state: int, seeds: list[int] | None = None) -> core.RowCodec:
    return core.RowCodec(
        weights=format.weights, state=format.state, dim=dim, state_floats=state,
        seeds=None if seeds is None else np.array(seeds, np.uint64),
    )  # fmt: skip


def padded(rows: np.ndarray) -> np.ndarray:
    wide = np.zeros((len(rows), -(-rows.shape[1] // 4) * 4), np.float32)
    wide[:, : rows.shape[1]] = rows
    return wide


def encode(made: core.RowCodec, rows: np.ndarray, keys: np.ndarray, slots: Any = None) -> np.ndarray:
    out = np.full((len(keys), made.row_bytes), 0x77, np.uint8)
    core.HostRows.view(padded(rows).view(np.uint8)).encode(made, keys, out, slots)
    return out


def decode(made: core.RowCodec, encoded: np.ndarray, columns: int) -> np.ndarray:
    wide = padded(np.full((len(encoded), columns), 77, np.float32))
    wide[:] = 77
    core.HostRows.view(wide.view(np.uint8)).decode(made, encoded)
    assert not wide[:, columns:].any()
    return wide[:, :columns]


def back(made: core.RowCodec, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return decode(made, encode(made, rows, keys), rows.shape[1])


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    there = ~np.isnan(a)
    np.testing.assert_array_equal(a[there].view(np.uint32), b[there].view(np.uint32))


def some_rows(rng: np.random.Generator, count: int, columns: int) -> np.ndarray:
    """Rows of many sizes: spread around 0 or far from it, tiny, huge, of few values, with zeros."""
    rows = rng.standard_normal((count, columns)) * 10.0 ** rng.uniform(-12, 4, (count, 1))
    rows[::3] += 10.0 ** rng.uniform(-3, 3, (len(rows[::3]), 1))
    rows[1::5] = np.round(rows[1::5])
    rows[rng.random(rows.shape) < 0.05] = 0
    rows[2::7] = rows[2::7, :1]
    return rows.astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from([None, SEEDS]),
    st.integers(1, 150),
    st.integers(0, 70),
    st.integers(0, 2**32),
)
def test_conversions_match_the_oracle_and_stay(
    format: RowFormat, seeds: list[int] | None, dim: int, state: int, draw: int
) -> None:
    rng = np.random.default_rng(draw)
    rows = some_rows(rng, 6, dim + state)
    keys = make_keys(1, rng.integers(0, 2**48, 6))
    expected = Oracle(format, dim, seeds).back(rows, keys)
    made = codec(format, dim, state, seeds)
    assert made.row_bytes == format.row_bytes(dim, state)
    first = None
    for isa in core.supported_isas():
        core.force_isa(isa)
        encoded = encode(made, rows, keys)
        first = encoded if first is None else first
        np.testing.assert_array_equal(encoded, first)
        same(decode(made, encoded, dim + state), expected)
        same(back(made, expected, keys), expected)
    core.force_isa("auto")


@formats
@ways
def test_slots_threads_and_order_do_not_matter(format: RowFormat, seeds: list[int] | None) -> None:
    rng = np.random.default_rng(3)
    rows, keys = some_rows(rng, 3000, 17), make_keys(0, rng.permutation(3000))
    made = codec(format, 16, 1, seeds)
    expected = encode(made, rows, keys)
    slots = rng.permutation(3000)[:2000].astype(np.int32)
    before = core.num_threads()
    for threads in (1, 2, 5):
        core.set_num_threads(threads)
        np.testing.assert_array_equal(encode(made, rows, keys[slots], slots), expected[slots])
    core.set_num_threads(before)
    wide = padded(np.zeros((3000, 17), np.float32))
    view = core.HostRows.view(wide.view(np.uint8))
    view.decode(made, expected, slots, slots)
    np.testing.assert_array_equal(wide[slots, :17], decode(made, expected, 17)[slots])
    view.decode(made, expected[slots], np.arange(2000, dtype=np.int32))
    np.testing.assert_array_equal(wide[:2000, :17], decode(made, expected, 17)[slots])


@pytest.mark.parametrize(("dtype", "theirs"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_nearest_is_torchs_rounding(dtype: str, theirs: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    halves = (np.uint32(0x8000), np.uint32(0x1000))
    ties = np.concatenate([bits & ~(2 * half - np.uint32(1)) | half for half in halves])
    small = (rng.integers(-(2**14), 2**14, 20_000) * 2.0**-26).astype(np.float32)
    values = np.concatenate([bits.view(np.float32), ties.view(np.float32), small])
    values = values[: len(values) // 8 * 8].reshape(-1, 8)
    got = back(codec(RowFormat(dtype), 8, 0), values, make_keys(0, np.arange(len(values))))
    want = torch.from_numpy(values).to(theirs).float().numpy()
    largest = torch.finfo(theirs).max
    too_large = np.isfinite(values) & np.isinf(want)
    assert (np.abs(got[too_large]) == np.float32(largest)).all()
    assert too_large.any() or dtype == "bf16"
    same(got[~too_large], want[~too_large])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("seeds", [None, SEEDS], ids=["nearest", "stochastic"])
def test_infinity_nan_and_the_largest_numbers(dtype: str, seeds: list[int] | None) -> None:
    largest = np.finfo(np.float32).max
    rows = np.array([[1, np.nan], [1, -np.inf], [largest, -largest], [largest, 1], [0.0, -0.0]], np.float32)
    made, keys = codec(RowFormat(dtype), 2, 0, seeds), make_keys(0, np.arange(5))
    got = back(made, rows, keys)
    out = np.zeros((5, made.row_bytes), np.uint8)
    lost = core.HostRows.view(padded(rows).view(np.uint8)).encode(made, keys, out)
    if dtype == "int8":
        assert lost == 0
        assert np.isnan(got[:4]).all()
        assert (got[4] == 0).all()
    else:
        assert lost == -1
        finite = {"bf16": np.float32(float.fromhex("0x1.fep127")), "fp16": np.float32(65504)}[dtype]
        assert got[0, 0] == 1
        assert np.isnan(got[0, 1])
        assert got[1].tolist() == [1, -np.inf]
        assert got[2:4].tolist() == [[finite, -finite], [finite, 1]]
        assert got[4].view(np.uint32).tolist() == rows[4].view(np.uint32).tolist()
    same(back(made, got, keys), got)


def test_int8_is_exact_where_it_can_be() -> None:
    rng = np.random.default_rng(5)
    for step in (2.0**-100, 2.0**-7, 1.0, 2.0**90):
        rows = ((rng.integers(0, 256, (50, 33)) + rng.integers(-30000, 30000, (50, 1))) * step).astype(
            np.float32
        )
        keys = make_keys(0, np.arange(50))
        for seeds in (None, SEEDS):
            np.testing.assert_array_equal(back(codec(RowFormat("int8"), 33, 0, seeds), rows, keys), rows)
    constant = np.full((1, 5), 0.1, np.float32)
    np.testing.assert_array_equal(
        back(codec(RowFormat("int8"), 5, 0), constant, make_keys(0, np.arange(1))), constant
    )


def test_int8_errs_by_a_255th_of_the_span_at_most() -> None:
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((500, 64)).astype(np.float32)
    span = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
    keys = make_keys(0, np.arange(500))
    assert (np.abs(back(codec(RowFormat("int8"), 64, 0), rows, keys) - rows) <= span * (1 / 253)).all()
    assert (np.abs(back(codec(RowFormat("int8"), 64, 0, SEEDS), rows, keys) - rows) <= span * (2 / 253)).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_stochastic_rounding_is_right_on_average(dtype: str) -> None:
    """Every row has the same weights; its state makes its random bits differ."""
    count, dim = 20_000, 9
    weights = np.linspace(-0.3, 0.7, dim, dtype=np.float32) + np.float32(0.00123)
    rows = np.concatenate([np.tile(weights, (count, 1)), np.arange(count, dtype=np.float32)[:, None]], axis=1)
    for keys in (make_keys(0, np.full(count, 3)), make_keys(0, np.arange(count))):
        got = back(codec(RowFormat(dtype), dim, 1, SEEDS), rows, keys)[:, :dim].astype(np.float64)
        step = got.max(axis=0) - got.min(axis=0)
        assert (np.abs(got.mean(axis=0) - weights) < 5 * step / np.sqrt(count) + 1e-12).all()
        assert (np.abs(np.corrcoef(got[:, step > 0].T) - np.eye((step > 0).sum())) < 0.04).all()


def test_random_bits_depend_on_seed_id_column_and_contents() -> None:
    rows = np.full((4, 65), 1 + 2**-8, np.float32)
    rows[2, 64] = 5
    keys = np.concatenate([make_keys(0, np.array([1, 2, 1])), make_keys(1, np.array([1]))])
    got = encode(codec(RowFormat("bf16"), 64, 1, SEEDS), rows, keys)[:, :128].copy().view(np.uint16)
    assert len({row.tobytes() for row in got}) == 4
    assert all(len(set(row.tolist())) == 2 for row in got)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="weights must be"):
        codec_of(weights="fp8")
    with pytest.raises(ValueError, match="state must be"):
        codec_of(state="fp16")
    with pytest.raises(ValueError, match="dim must be"):
        codec_of(dim=0)
    made, rows = codec(RowFormat("bf16"), 8, 0, SEEDS), core.HostRows.view(np.zeros((2, 32), np.uint8))
    keys, out = make_keys(0, np.arange(2)), np.zeros((2, made.row_bytes), np.uint8)
    with pytest.raises(ValueError, match=r"codec\.row_bytes"):
        rows.encode(made, keys, out[:1])
    with pytest.raises(ValueError, match="no entry in seeds"):
        rows.encode(made, make_keys(2, np.arange(2)), out)
    with pytest.raises(ValueError, match="differ in length"):
        rows.encode(made, keys, out, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="differ in length"):
        rows.decode(made, out, np.zeros(1, np.int32), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="smaller than"):
        core.HostRows.view(np.zeros((2, 16), np.uint8)).encode(made, keys, out)


def codec_of(**changes: Any) -> core.RowCodec:
    return core.RowCodec(**{"weights": "bf16", "state": "fp32", "dim": 8, "state_floats": 0, **changes})
