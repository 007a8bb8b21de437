"""Lookups that the GPU's kernels deduplicate, in the emulator: those of the host."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from tests.cuda.emulated import Launch, aligned
from tierstore import _core
from tierstore.cuda.sorting import TILE, Room

Segment = tuple[np.ndarray, int, int, int]
"""Ids, their table, its rows, and the id that is skipped."""


def described(segments: list[Segment]) -> list[tuple[int, int, bool, int, int, int]]:
    return [
        (ids.ctypes.data, len(ids), ids.dtype == np.int32, table, bound, padding)
        for ids, table, bound, padding in segments
    ]


def sort_keys(segments: list[Segment]) -> tuple[np.ndarray, dict[int, int], int, tuple[int, int, int]]:
    """The keys, where the keys of each table begin, the key of padding, and the first bad id."""
    bounds = {table: bound for _, table, bound, _ in segments}
    ends = np.cumsum([0, *bounds.values()]).tolist()
    bases = dict(zip(bounds, ends, strict=False))
    keys = np.empty(sum(len(ids) for ids, *_ in segments), np.uint32)
    of_segments = [bases[table] for _, table, *_ in segments]
    return keys, bases, ends[-1], _core.sort_keys(described(segments), of_segments, ends[-1], keys)


def deduplicated(segments: list[Segment], seed: int) -> list[np.ndarray]:
    """Unique keys, inverse and positions of a lookup by the kernels, which may access nothing else."""
    keys, bases, skipped, bad = sort_keys(segments)
    assert bad == (-1, 0, 0)
    n, launch = len(keys), Launch(seed)
    room = Room(0, n, skipped, len(bases))
    memory = aligned(np.full(room.size + 16, 0xEE, np.uint8))
    room = replace(room, base=memory.ctypes.data)
    copied = [keys, np.array([*bases.values()], np.uint32), np.array([*bases], np.uint32)]
    views = []
    for number, (address, size) in enumerate(room.arrays):
        begin = address - room.base
        views.append(memory[begin : begin + size])
        if number < len(copied):
            views[-1][:] = copied[number].view(np.uint8)
        launch.array(f"array {number}", views[-1], writable=number >= len(copied))
    found = [aligned(np.full(count, 7, np.int32)) for count in (n, n, n + 1)]
    given = [launch.array(f"result {i}", array, writable=True) or 0 for i, array in enumerate(found)]
    names = []
    for name, args, threads in room.steps(*given):
        assert threads % 32 == 0
        launch(name, args, of_layout=False)
        names.append(name)
    assert names[-2:] == ["batch_unique", "batch_positions"]
    at = memory[room.totals - room.base :].view(np.int32)
    num_unique, used = int(at[0]), int(at[1])
    inverse, csr_positions, csr_start = found
    assert csr_positions[used:].tolist() == [7] * (n - used)
    unique = memory[room.unique - room.base :][: 8 * num_unique].view(np.uint64)
    return [unique, inverse, csr_start[: num_unique + 1], csr_positions[:used]]


def check(segments: list[Segment], seed: int) -> None:
    batch, *bad = _core.make_batch(described(segments))
    assert bad == [-1, 0, 0]
    expected = [batch.unique, batch.inverse, *batch.transposed()]
    for ours, theirs in zip(deduplicated(segments, seed), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


SIZES = [1, 2, 31, 32, 33, 63, 64, 65, TILE - 1, TILE, TILE + 1, 3 * TILE, 3 * TILE + 17]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bound", [1, 100, 1 << 7, 1 << 20, (1 << 32) - 1])
def test_lookups_of_any_size(n: int, bound: int) -> None:
    rng = np.random.default_rng(n)
    check([(rng.integers(0, bound, n), 3, bound, -1)], n)


@pytest.mark.parametrize("seed", range(20))
def test_random_lookups(seed: int) -> None:
    """Several segments of some tables, of both types of ids, with few or much padding."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    bounds = rng.choice([1, 2, 40, 127, 128, 129, 5000, 1 << 20, 1 << 28], 5)
    for _ in range(int(rng.integers(1, 9))):
        table = int(rng.integers(5))
        bound, n = int(bounds[table]), int(rng.integers(0, 700))
        ids = rng.integers(0, bound, n) // int(rng.choice([1, 7]))
        padding = int(rng.choice([-1, 0, bound - 1]))
        ids[rng.random(n) < rng.choice([0, 0.1, 0.9])] = max(padding, 0)
        dtype = np.int32 if rng.random() < 0.5 else np.int64
        segments.append((ids.astype(dtype), table * 1000, bound, padding))
    segments.append((np.array([0]), 0, int(bounds[0]), -1))
    check(segments, seed)


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(70 * TILE, np.int64),  # a run over more tiles than a warp has lanes
        np.r_[1, np.zeros(40 * TILE, np.int64), 2],
        np.arange(2 * TILE + 5),
        np.arange(2 * TILE + 5)[::-1].copy(),
        np.repeat(np.arange(7), TILE),
        np.tile(np.arange(7), TILE),
    ],
    ids=["one", "one between two", "all distinct", "descending", "tiles", "turns"],
)
@pytest.mark.parametrize("padding", [-1, 0])
def test_runs_of_any_length(ids: np.ndarray, padding: int) -> None:
    check([(ids, 1, len(ids), padding)], 5)


def test_positions_that_are_all_skipped() -> None:
    check([(np.full(700, 3), 1, 9, 3)], 1)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [{0: -1}, {69_999: 50}, {5: 50, 40_000: -7}, {40_000: -7, 69_999: 1 << 30}])
def test_bad_ids_are_those_of_the_host(dtype: type, wrong: dict[int, int]) -> None:
    ids = np.arange(70_000) % 50
    ids[list(wrong)] = list(wrong.values())
    ids = ids.astype(dtype)
    segments: list[Segment] = [(np.arange(9), 0, 9, -1), (ids, 4, 50, 3), (np.full(3, 99), 5, 9, -1)]
    assert sort_keys(segments)[3] == _core.make_batch(described(segments))[1:]
    assert sort_keys(segments[:1])[3] == (-1, 0, 0)


@pytest.mark.parametrize("count", [1, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 1 << 16])
def test_threads_share_the_ids_of_a_segment(count: int) -> None:
    ids = np.random.default_rng(count).integers(0, 90, count)
    segments: list[Segment] = [(ids, 2, 90, 7), (ids.astype(np.int32), 1, 95, -1)]
    keys, bases, skipped, bad = sort_keys(segments)
    assert bad == (-1, 0, 0)
    np.testing.assert_array_equal(keys[:count], np.where(ids == 7, skipped, bases[2] + ids))
    np.testing.assert_array_equal(keys[count:], bases[1] + ids)
    for place in (0, count - 1):
        wrong = ids.copy()
        wrong[place] = 95
        segments[1] = (wrong.astype(np.int32), 1, 95, -1)
        assert sort_keys(segments)[3] == _core.make_batch(described(segments))[1:] == (1, place, 95)


def test_keys_fit_their_segments() -> None:
    segments: list[Segment] = [(np.arange(9), 0, 9, -1)]
    for bases, count in (([0, 0], 9), ([0], 8)):
        with pytest.raises(ValueError):
            _core.sort_keys(described(segments), bases, 9, np.empty(count, np.uint32))


def test_the_room_is_known() -> None:
    """What the device takes: 25 bytes for each position, and a little for each table."""
    room = Room(0, 1 << 20, 1 << 28, 26)
    assert room.size < 25.1 * (1 << 20)
    assert ctypes.sizeof(next(room.steps(0, 0, 0))[1]) == 72
