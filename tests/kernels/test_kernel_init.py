"""Initial rows: same bits as the NumPy oracle, right distributions, no trace of order or place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from tests.kernels.kernel_oracle import initial_weights, normal_quantile, philox
from tierstore import _core as core

CONSTANT, UNIFORM, NORMAL = 0, 1, 2


def init(
    keys: np.ndarray,
    dim: int,
    tables: list[tuple[int, float, float, int]],
    slots: np.ndarray | None = None,
    state: tuple[int, float] = (0, 0.0),
    num_slots: int | None = None,
) -> np.ndarray:
    width = -(-(dim + state[0]) // 4) * 4
    rows = np.full((num_slots or len(keys), width), 77, np.float32)
    kinds, a, b, seeds = (np.array(x, t) for x, t in zip(zip(*tables, strict=True), "BffQ", strict=True))
    values = core.InitialValues(
        dim=dim, state_floats=state[0], state_value=state[1], kinds=kinds, first=a, second=b, seeds=seeds
    )
    core.HostRows.view(rows.view(np.uint8)).initialise(values, slots, keys)
    return rows


def test_philox_matches_the_published_vectors() -> None:
    """Known answers of the reference implementation (Random123, kat_vectors) that have a zero fourth word."""
    assert philox([0], [0], [0], 0).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


def test_normal_quantile_is_accurate() -> None:
    p = np.concatenate(
        [np.linspace(1e-6, 1 - 1e-6, 20001), 2.0 ** -np.arange(1.0, 34.0), 1 - 2.0 ** -np.arange(1.0, 34)]
    )
    np.testing.assert_allclose(normal_quantile(p), ndtri(p), rtol=2e-14, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 2),
    st.floats(-10, 10, width=32),
    st.floats(0, 4, width=32),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32),
)
def test_init_matches_the_oracle(dim: int, kind: int, a: float, span: float, seed: int, draw: int) -> None:
    rng = np.random.default_rng(draw)
    ids = rng.integers(0, 2**48, 9, dtype=np.uint64)
    b = float(np.float32(a) + np.float32(span))
    expected = initial_weights(ids, dim, kind, a, b, seed)
    for isa in core.supported_isas():
        core.force_isa(isa)
        rows = init(ids, dim, [(kind, a, b, seed)], state=(3, 0.5))
        np.testing.assert_array_equal(rows[:, :dim].view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(rows[:, dim : dim + 3], np.float32(0.5))
        np.testing.assert_array_equal(rows[:, dim + 3 :], 0)
    core.force_isa("auto")


@pytest.mark.parametrize(
    ("kind", "a", "b", "expected"),
    [
        (UNIFORM, -0.1, 0.1, "0x1.649c72p-4 -0x1.fadcap-7 0x1.463cap-8 -0x1.7c5c54p-5 -0x1.0711cp-6"),
        (NORMAL, 0.0, 1.0, "0x1.843ffep+0 -0x1.8f8e4p-3 0x1.ff6df2p-5 -0x1.3d1a18p-1 -0x1.9ef51cp-3"),
    ],
)
def test_golden_values(kind: int, a: float, b: float, expected: str) -> None:
    """Rows that were never updated are not stored, so their values are part of the format of every store."""
    row = init(np.array([7], np.uint64), 5, [(kind, a, b, 2**63 + 12345)])[0]
    assert row[:5].tolist() == [float.fromhex(x) for x in expected.split()]


def test_values_depend_on_neither_order_nor_slot_nor_table_position() -> None:
    ids = np.arange(5000, dtype=np.uint64)
    alone = init(ids, 10, [(NORMAL, 0, 1, 42)])
    order = np.random.default_rng(0).permutation(len(ids))
    slots = np.random.default_rng(1).permutation(6000)[: len(ids)].astype(np.int32)
    keys = (np.uint64(2) << np.uint64(48)) | ids[order]
    tables = [(CONSTANT, 1, 0, 0), (UNIFORM, 0, 1, 7), (NORMAL, 0, 1, 42)]
    rows = init(keys, 10, tables, slots, num_slots=6000)
    np.testing.assert_array_equal(rows[slots], alone[order])
    untouched = np.setdiff1d(np.arange(6000), slots)
    np.testing.assert_array_equal(rows[untouched], 77)


def test_distributions() -> None:
    ids = np.arange(20_000, dtype=np.uint64)
    uniform = init(ids, 16, [(UNIFORM, -0.25, 0.75, 3)])
    assert uniform.min() >= -0.25
    assert uniform.max() < 0.75
    assert abs(uniform.mean() - 0.25) < 2e-3
    assert abs(uniform.std() - 12**-0.5) < 2e-3
    normal = init(ids, 16, [(NORMAL, 2.0, 3.0, 3)])
    assert abs(normal.mean() - 2) < 0.03
    assert abs(normal.std() - 3) < 0.03
    standard = (normal - 2) / 3
    assert abs((standard**4).mean() - 3) < 0.1
    correlation = np.corrcoef(normal[:5000].T)
    assert np.abs(correlation - np.eye(16)).max() < 0.06


def test_bad_arguments() -> None:
    keys = np.array([1 << 48], np.uint64)
    with pytest.raises(ValueError, match="table"):
        init(keys, 4, [(CONSTANT, 1, 0, 0)])
    with pytest.raises(ValueError, match="kinds"):
        init(np.zeros(1, np.uint64), 4, [(3, 1, 0, 0)])
    with pytest.raises(ValueError, match="slots"):
        init(np.zeros(1, np.uint64), 4, [(CONSTANT, 1, 0, 0)], slots=np.zeros(2, np.int32))
    with pytest.raises(TypeError):
        init(np.zeros(1, np.int64), 4, [(CONSTANT, 1, 0, 0)])


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 14, 66])
@pytest.mark.parametrize("dim", [1, 5, 16, 17, 32, 33, 48, 49, 64, 65, 90])
def test_a_range_of_columns_begins_where_it_is_in_the_whole_table(kind: int, first: int, dim: int) -> None:
    keys = np.array([5, (1 << 40) + 3], np.uint64)
    whole, part = np.zeros((2, 160), np.float32), np.zeros((2, 92), np.float32)
    for rows, width, columns in ((whole, 160, None), (part, dim, np.array([first], np.int64))):
        values = core.InitialValues(
            dim=width, state_floats=0, state_value=0.0, kinds=np.array([kind], np.uint8),
            first=np.array([-1.0], np.float32), second=np.array([1.0], np.float32),
            seeds=np.array([77], np.uint64), columns=columns,
        )  # fmt: skip
        core.HostRows.view(rows.view(np.uint8)).initialise(values, None, keys)
    np.testing.assert_array_equal(part[:, :dim], whole[:, first : first + dim])
    assert not part[:, dim:].any()
