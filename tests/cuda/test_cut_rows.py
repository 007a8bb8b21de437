"""Rows on a GPU whose weights and state are in two address ranges, which grow and shrink together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_device import FakeDevice, fake_device
from tierstore import GpuError
from tierstore import _core as core
from tierstore.cuda.compute import CudaRows
from tierstore.cuda.memory import Arena

DIM, WEIGHTS, ROW, SLOTS = 32, 128, 144, 4096
PAGE = 4096
"""Of the fake's memory: 32 rows of weights, 256 of state."""
OUT_OF_MEMORY = 2


def first(n: int, begin: int = 0) -> np.ndarray:
    return np.arange(begin, begin + n, dtype=np.int32)


def some(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (n, ROW), np.uint8)


def read(rows: CudaRows, slots: np.ndarray) -> np.ndarray:
    out = np.zeros((len(slots), ROW), np.uint8)
    rows.copy_out(slots, out)
    return out


def used() -> int:
    return fake_gpu().alive[0]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device("lazy") as opened:
        yield opened


def filled(device: FakeDevice, slots: int = 256) -> tuple[CudaRows, np.ndarray]:
    rows, data = device.allocate(SLOTS, ROW, dim=DIM), some(slots)
    rows.commit(slots)
    rows.copy_in(first(slots), data)
    device.synchronize()
    return rows, data


@pytest.mark.parametrize(
    ("weights", "dim", "row_bytes", "is_cut"),
    [
        ("fp32", 16, 80, True),
        ("fp32", 15, 80, False),
        ("fp32", 17, 80, False),
        ("fp32", 16, 64, False),
        ("fp32", 0, 80, False),
        ("bf16", 32, 80, True),
        ("fp16", 31, 80, True),
        ("fp16", 16, 80, False),
    ],
)
def test_weights_that_fill_units_of_memory_are_apart(
    device: FakeDevice, weights: str, dim: int, row_bytes: int, is_cut: bool
) -> None:
    """Two ranges take the bytes of one, up to whole pages."""
    before, objects = fake_gpu().alive
    rows = device.allocate(1024, row_bytes, weights, dim)
    assert fake_gpu().alive[1] - objects == (2 if is_cut else 1)
    rows.commit(1024)
    assert used() - before == 1024 * row_bytes
    args = rows.rows_args(dim)
    assert (args.weight_floats, args.state_floats) == ((16, 4) if is_cut else (row_bytes // 4,) * 2)
    del rows


@pytest.mark.parametrize("after", [0, 1], ids=["weights", "state"])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_growth_that_fails_leaves_both_ranges_as_they_were(device: FakeDevice, call: str, after: int) -> None:
    rows, data = filled(device)
    before = fake_gpu().alive
    fake_gpu().fail(call, OUT_OF_MEMORY, after)
    with pytest.raises(core.AddressSpaceError if call == "cuMemCreate" else GpuError):
        rows.commit(2048)
    assert fake_gpu().alive == before
    np.testing.assert_array_equal(read(rows, first(256)), data)
    rows.commit(2048)
    rows.copy_in(first(256, 1792), data)
    np.testing.assert_array_equal(read(rows, first(512, 1536))[256:], data)
    np.testing.assert_array_equal(read(rows, first(256)), data)
    del rows


def test_rows_beyond_the_memory_of_the_gpu_are_refused(device: FakeDevice) -> None:
    rows, data = filled(device)
    before = fake_gpu().alive
    room = 512 * WEIGHTS  # enough for the weights of 512 rows more, and not for their state
    fake_gpu().set_memory(before[0] + room + PAGE)
    with pytest.raises(core.AddressSpaceError, match=r"72 KiB of GPU memory are needed"):
        rows.commit(768)
    assert fake_gpu().alive == before
    fake_gpu().set_memory(before[0] + room + 2 * PAGE)
    rows.commit(768)
    assert used() == before[0] + room + 2 * PAGE
    np.testing.assert_array_equal(read(rows, first(256)), data)
    fake_gpu().set_memory(1 << 30)
    del rows


def pieces(rows: CudaRows) -> list[int]:
    """How many pieces of memory each range has."""
    memory = cast("Arena", rows._memory)
    return [len(found._pieces) for found in memory._ranges]


def test_growth_takes_an_eighth_more_than_is_there(device: FakeDevice) -> None:
    """So that few of many steps wait for the driver."""
    slots, step = 1 << 15, 64
    rows, before = device.allocate(slots, ROW, dim=DIM), used()
    for wanted in range(step, slots + 1, step):
        rows.commit(wanted)
        assert wanted * ROW <= used() - before <= wanted * ROW * 9 // 8 + 3 * PAGE
    assert used() - before == slots * ROW
    assert max(pieces(rows)) < 50  # of 512 steps
    del rows


def test_growth_takes_an_eighth_of_what_is_free_at_most(device: FakeDevice) -> None:
    rows, _ = filled(device, 2048)
    fake_gpu().set_memory(used() + 16 * PAGE)
    before = used()
    rows.commit(2048 + 32)  # a page of weights, and one of state
    assert used() - before == 3 * PAGE
    fake_gpu().set_memory(1 << 30)
    del rows


def test_no_row_beyond_those_that_are_kept_has_memory_before_it_is_needed(device: FakeDevice) -> None:
    rows, before = device.allocate(SLOTS, ROW, dim=DIM, kept=1024), used()
    rows.commit(1000)
    rows.commit(1000 + 8)
    assert used() - before == 1024 * ROW
    rows.commit(1024 + 32)
    assert used() - before == 1024 * ROW + 2 * PAGE
    del rows


@pytest.mark.parametrize("after", [0, 1], ids=["weights", "state"])
def test_growth_that_is_refused_more_takes_what_it_needs(device: FakeDevice, after: int) -> None:
    rows, data = filled(device, 2048)
    before, objects = fake_gpu().alive
    fake_gpu().fail("cuMemCreate", OUT_OF_MEMORY, after)
    rows.commit(2048 + 64)
    assert fake_gpu().alive == (before + 3 * PAGE, objects + 4)
    np.testing.assert_array_equal(read(rows, first(2048)), data)
    del rows


def test_growth_that_is_refused_altogether_says_what_it_needs(device: FakeDevice) -> None:
    rows, data = filled(device, 2048)
    before = fake_gpu().alive
    fake_gpu().set_memory(used() + 2 * PAGE)
    with pytest.raises(core.AddressSpaceError, match=r"12 KiB of GPU memory are needed, and 8 KiB of"):
        rows.commit(2048 + 64)
    assert fake_gpu().alive == before
    np.testing.assert_array_equal(read(rows, first(2048)), data)
    fake_gpu().set_memory(1 << 30)
    del rows


def test_address_space_that_is_refused_gives_the_first_range_back(device: FakeDevice) -> None:
    before = fake_gpu().alive
    fake_gpu().fail("cuMemAddressReserve", OUT_OF_MEMORY, after=1)
    with pytest.raises(GpuError):
        device.allocate(SLOTS, ROW, dim=DIM)
    assert fake_gpu().alive == before


@pytest.mark.parametrize("order", ORDERS)
def test_both_ranges_shrink_and_grow_again(order: str) -> None:
    with fake_device(order) as device:
        rows, data = device.allocate(SLOTS, ROW, dim=DIM), some(1024)
        rows.commit(256)
        small = used()
        rows.commit(1024)
        rows.copy_in(first(1024), data)
        whole = used()
        rows.discard(256)
        device.synchronize()
        rows.commit(1024)  # takes nothing, and gives back what can be
        assert whole - used() == 768 * ROW
        assert used() >= small
        rows.copy_in(first(2, 1000), data[:2])
        np.testing.assert_array_equal(read(rows, first(256)), data[:256])
        np.testing.assert_array_equal(read(rows, first(2, 1000)), data[:2])
        rows.discard(300)  # within pages of both ranges
        device.synchronize()
        np.testing.assert_array_equal(read(rows, first(256)), data[:256])
        del rows


def test_a_discard_is_not_forgotten_where_growth_fails(device: FakeDevice) -> None:
    rows, _ = filled(device)
    before = used()
    rows.commit(1024)
    rows.copy_in(first(768, 256), some(768))  # on its way
    rows.discard(256)
    assert used() > before
    fake_gpu().fail("cuMemCreate", OUT_OF_MEMORY, after=1)
    with pytest.raises(core.AddressSpaceError):
        rows.commit(2048)
    device.synchronize()
    rows.commit(256)
    assert used() == before
    del rows


def test_rows_that_are_cut_elsewhere_are_refused(device: FakeDevice) -> None:
    (rows, data), other = filled(device), device.allocate(SLOTS, ROW, dim=16)
    other.commit(4)
    with pytest.raises(ValueError, match="as many weights"):
        other.copy_rows(first(2), rows, first(2))
    args = core.LookupArgs(dim=16, slots=first(2), inverse=first(2))
    with pytest.raises(ValueError, match="another number of columns"):
        rows.lookup_rows(args, device.share(np.zeros((2, 16), np.float32)), 16)
    whole = device.allocate(SLOTS, ROW)
    whole.commit(4)
    whole.copy_rows(first(2), rows, first(2, 9))
    other.copy_rows(first(2), whole, first(2))
    np.testing.assert_array_equal(read(other, first(2)), data[9:11])
    del rows, other, whole
