"""``uvm`` beside a GPU: memory of the host that kernels read and write in place, registered or managed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_device import FakeDevice, checked_views, fake_device
from tests.cuda.test_cuda_device import without_order
from tierstore import ClosedError, GpuError
from tierstore import _core as core
from tierstore.cuda import rows as rows_module
from tierstore.cuda import uvm as uvm_module
from tierstore.cuda.streams import Stream
from tierstore.cuda.uvm import UvmRows

KINDS = ["pinned", "managed"]
ROW, SLOTS, DIM = 144, 40, 32  # the GPU cuts such rows; those of uvm and on their way are whole
COMPUTED = DIM, "fp32", 1  # columns, dtype and kind of step of the rows that `Hierarchy` updates
PAGE = 2 << 20


def first(n: int, begin: int = 0) -> np.ndarray:
    return np.arange(begin, begin + n, dtype=np.int32)


def some(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((n, ROW // 4), np.float32).view(np.uint8)


class Hierarchy:
    """Rows of ``hbm`` and ``uvm``, which move as in a training; twins on the host do the same at once."""

    def __init__(self, device: FakeDevice, kind: str, seed: int) -> None:
        self.device, self.random = device, np.random.default_rng(seed)
        self.hbm, self.staging = device.allocate(SLOTS, ROW, dim=DIM), device.staging(SLOTS, ROW)
        self.uvm: UvmRows = device.uvm(kind).allocate(SLOTS, ROW, dim=DIM)
        self.host_hbm, self.host_uvm = core.HostRows(SLOTS, ROW), core.HostRows(SLOTS, ROW)
        for rows in (self.hbm, self.uvm, self.staging, self.host_hbm, self.host_uvm):
            rows.commit(SLOTS)
        for rows in ((self.hbm, self.host_hbm), (self.uvm, self.host_uvm)):
            for one in rows:
                one.copy_in(first(SLOTS), some(SLOTS, seed))

    def some_slots(self) -> tuple[np.ndarray, np.ndarray]:
        n = int(self.random.integers(1, 9))
        chosen = (self.random.permutation(SLOTS)[:n].astype(np.int32) for _ in range(2))
        return tuple(chosen)  # type: ignore[return-value]

    def plan(self) -> None:
        """Lift rows, let victims go down, and fill their slots."""
        up, down = self.some_slots()
        self.staging.copy_rows(first(len(up)), self.uvm, up)
        self.uvm.copy_rows(up, self.hbm, down)  # to the slots that were just left
        self.hbm.copy_rows(down, self.staging, first(len(up)))
        promoted, victims = np.zeros((len(up), ROW), np.uint8), np.zeros((len(up), ROW), np.uint8)
        self.host_uvm.copy_out(up, promoted)
        self.host_hbm.copy_out(down, victims)
        self.host_uvm.copy_in(up, victims)
        self.host_hbm.copy_in(down, promoted)

    def update(self) -> None:
        slots, _ = self.some_slots()
        start, positions = core.build_csr(first(len(slots)), len(slots))
        grad = self.random.standard_normal((len(slots), DIM)).astype(np.float32)
        args = core.UpdateArgs(
            dim=DIM, slots=slots, csr_start=start, csr_positions=positions,
            step=core.OptimizerStep(kind=COMPUTED[2], lr=0.1, eps=1e-8),
        )  # fmt: skip
        self.hbm.update_rows(args, self.device.share(grad), DIM)
        self.host_hbm.update_rows(args, grad.ctypes.data, DIM)

    def leave(self) -> None:
        """Copy rows of uvm out, as for the store."""
        slots, _ = self.some_slots()
        mine, expected = (np.zeros((len(slots), ROW), np.uint8) for _ in range(2))
        self.uvm.copy_out(slots, mine)
        self.host_uvm.copy_out(slots, expected)
        np.testing.assert_array_equal(mine, expected)

    def put_back(self) -> None:
        """Write rows of uvm, as after a plan that failed."""
        slots, _ = self.some_slots()
        data, source = some(SLOTS, 9), self.random.permutation(SLOTS)[: len(slots)].astype(np.int32)
        for rows in (self.uvm, self.host_uvm):
            rows.copy_in(slots, data, source)

    def recode(self) -> None:
        codec = core.RowCodec(weights="bf16", state="fp32", dim=DIM, state_floats=4)
        slots, _ = self.some_slots()
        keys = slots.astype(np.uint64)
        for rows in (self.uvm, self.host_uvm):
            encoded = np.zeros((len(slots), codec.row_bytes), np.uint8)
            assert rows.encode(codec, keys, encoded, slots) == -1
            rows.decode(codec, encoded, slots)

    def do(self, steps: int) -> None:
        names = ("plan", "update", "leave", "put_back", "recode")
        for name in self.random.choice(names, steps, p=[0.4, 0.3, 0.1, 0.1, 0.1]):
            getattr(self, str(name))()
        for mine, twin in ((self.hbm, self.host_hbm), (self.uvm, self.host_uvm)):
            out, expected = (np.zeros((SLOTS, ROW), np.uint8) for _ in range(2))
            mine.copy_out(first(SLOTS), out)
            twin.copy_out(first(SLOTS), expected)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ORDERS)
def test_rows_move_as_on_the_host(order: str, seed: int, kind: str) -> None:
    with fake_device(order, seed) as device:
        work = Hierarchy(device, kind, seed)
        before = fake_gpu().waits
        work.plan()
        work.update()
        assert fake_gpu().waits == before  # nobody waits while rows move
        work.do(60)
        del work


@contextmanager
def reading_at_once() -> Iterator[None]:
    """The host does not wait for rows of uvm."""
    with mock.patch.object(rows_module.Touched, "last", return_value=[]):
        yield


WAITS: dict[str, Callable] = {
    "victims before their last update": lambda: without_order(Stream.DOWN, Stream.COMPUTE),
    "victims before the rows that they replace are promoted": lambda: without_order(Stream.DOWN, Stream.UP),
    "fill before the victims have left": lambda: without_order(Stream.UP, Stream.DOWN),
    "update before its rows are filled": lambda: without_order(Stream.COMPUTE, Stream.UP),
    "rows of uvm used by the host too early": reading_at_once,
}


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_found(wait: str, order: str) -> None:
    found = []
    for seed in range(3):
        fake_gpu().begin(order, seed, 1 + seed % 4)
        with checked_views(), mock.patch.object(rows_module, "STAGING_BYTES", 256):
            device = FakeDevice()
            work = Hierarchy(device, "pinned", seed)
            try:
                with WAITS[wait]():
                    work.do(60)
            except (AssertionError, GpuError):
                pass  # wrong values, too
            for stream in Stream:
                fake_gpu().run(device.stream(stream))
            found += fake_gpu().wrong
            device.abandon()
            del work
    assert found, "the wait is not needed, or the checker does not see that it is"
    assert all("not ordered after" in line for line in found)


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_memory_is_registered_piece_by_piece(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At, just below and just past multiples of a piece; rows on both sides of a border."""
    monkeypatch.setattr(uvm_module, "PIECE", 2 * PAGE)
    with fake_device() as device:
        slots = (4 * PAGE + more * PAGE) // ROW
        rows = device.uvm("pinned").allocate(slots, ROW)
        rows.commit(1)
        assert rows._memory.mapped == PAGE
        rows.commit(slots)
        assert rows._memory.mapped == 4 * PAGE + more * PAGE
        assert len(rows._memory._pieces) == 1 + -(-(3 * PAGE + more * PAGE) // (2 * PAGE))
        near, data = device.allocate(8, ROW), some(8)
        near.commit(8)
        near.copy_in(first(8), data)
        border = np.array(
            [0, *range(PAGE // ROW - 1, PAGE // ROW + 3), slots - 3, slots - 2, slots - 1], np.int32
        )
        rows.copy_rows(border, near, first(8))
        out = np.zeros_like(data)
        rows.copy_out(border, out)
        np.testing.assert_array_equal(out, data)
        rows.discard(0)  # pages that are registered must stay
        rows.copy_out(border, out)
        np.testing.assert_array_equal(out, data)
        del rows, near
        assert fake_gpu().alive[1] == 0 or device.parts.indices.nbytes


def test_memory_that_cannot_be_registered_leaves_earlier_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvm_module, "PIECE", PAGE)
    with fake_device() as device:
        rows, data = device.uvm("pinned").allocate(4 * PAGE // ROW, ROW), some(4)
        rows.commit(4)
        rows.copy_in(first(4), data)
        fake_gpu().fail("cuMemHostRegister", 2, after=1)
        with pytest.raises(
            core.AddressSpaceError, match=r"2 MiB of host memory cannot be locked .* 4 MiB that are"
        ):
            rows.commit(4 * PAGE // ROW)
        out = np.zeros_like(data)
        rows.copy_out(first(4), out)
        np.testing.assert_array_equal(out, data)
        rows.commit(4 * PAGE // ROW)
        rows.copy_in(first(1, 4 * PAGE // ROW - 1), data[:1])
        del rows


def test_managed_memory_stays_with_the_host() -> None:
    with fake_device() as device:
        rows = device.uvm("managed").allocate(10, ROW)
        counts = fake_gpu().counts
        assert (counts["prefers_host"], counts["accessed_by"]) == (1, 1)
        for call in ("cuMemAllocManaged", "cuMemAdvise"):
            before = fake_gpu().alive
            fake_gpu().fail(call, 1)
            with pytest.raises(GpuError, match=call):
                device.uvm("managed").allocate(10, ROW)
            assert fake_gpu().alive == before
        fake_gpu().fail("cuMemAllocManaged", 2)
        with pytest.raises(core.AddressSpaceError, match="the driver refuses 2 MiB of managed memory"):
            device.uvm("managed").allocate(10, ROW)
        fake_gpu().set_shares_managed(False)
        with pytest.raises(GpuError, match=r"cannot share managed memory .* use uvm_kind='pinned'"):
            device.uvm("managed")
        fake_gpu().set_host_pointers(False)
        with pytest.raises(GpuError, match=r"at the host's addresses; use uvm_kind='managed'"):
            device.uvm("pinned")
        del rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["eager", "lazy"])
def test_memory_is_given_back_after_the_last_operation(kind: str, order: str) -> None:
    with fake_device(order) as device:
        near = device.allocate(8, ROW)
        near.commit(8)
        near.copy_in(first(8), some(8))
        before = fake_gpu().alive
        rows = device.uvm(kind).allocate(8, ROW)
        rows.commit(8)
        rows.copy_rows(first(8), near, first(8))
        del rows
        assert fake_gpu().alive[1] <= before[1] + 2  # but for events
        del near


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    with fake_device() as device:
        rows, near = device.uvm(kind).allocate(8, ROW), device.allocate(8, ROW)
        rows.commit(8)
        near.commit(4)
        near.copy_in(first(4), some(4))
        for slots, source in ((first(2), first(3)), (first(2), first(2, 3)), (first(2, 7), first(2))):
            with pytest.raises(ValueError, match=r"differ in length|a slot has no memory"):
                rows.copy_rows(slots, near, source)
        with pytest.raises(ValueError, match="not as long"):
            rows.copy_rows(first(2), device.allocate(4, 2 * ROW), first(2))
        for bad in (first(1, 8), np.array([-1], np.int32)):
            with pytest.raises(ValueError, match="a slot has no memory"):
                rows.copy_out(bad, np.zeros((1, ROW), np.uint8))
        with pytest.raises(ValueError, match="not so many slots"):
            rows.commit(9)
        rows.copy_rows(first(0), near, first(0))
        device.synchronize()
        del rows, near


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_leaves_the_memory_alone(kind: str) -> None:
    with fake_device() as device:
        rows, data = device.uvm(kind).allocate(8, ROW), some(8)
        rows.commit(8)
        rows.copy_in(first(8), data)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rows.copy_out(first(8), np.zeros((8, ROW), np.uint8))
            except ClosedError:
                del rows
                device.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        out = np.zeros_like(data)
        rows.copy_out(first(8), out)
        np.testing.assert_array_equal(out, data)
        del rows
