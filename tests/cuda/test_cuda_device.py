"""``CudaDevice`` on the fake driver: the bits of the host in every order of streams, with every wait it needs
and no other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.cuda.compiled import shared_library
from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_device import FakeDevice, checked_views, fake_device
from tests.cuda.random_work import RandomWork, kernels_are_kept
from tierstore import GpuError
from tierstore import _core as core
from tierstore.cuda import rows as rows_module
from tierstore.cuda.compute import CudaRows
from tierstore.cuda.cubins import CubinCache
from tierstore.cuda.device import Libraries
from tierstore.cuda.lookups import LookupMaker
from tierstore.cuda.memory import Blocks
from tierstore.cuda.rows import Departure
from tierstore.cuda.staged import MadeArrays
from tierstore.cuda.streams import Operation, Stream, Streams

LAYOUTS = [(3, 1), (8, 0), (8, 3), (20, 2), (3, 9, "fp16"), (8, 1, "bf16"), (20, 3, "fp16"), (20, 0, "bf16")]
LAYOUTS += [(32, 0), (32, 1), (32, 3), (32, 1, "bf16"), (32, 8, "fp16")]  # weights of 64 and 128 bytes
ROW = 48


def some(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (n, ROW), np.uint8)


def first(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ORDERS)
def test_random_work_has_the_bits_of_the_host(order: str, seed: int, layout: tuple) -> None:
    dim, kind, *weights = layout
    with fake_device(order, seed) as device:
        work = RandomWork(device, dim, kind, seed, *weights)
        work.do(50)
        del work
        counts = fake_gpu().counts
    assert min(counts["launches"], counts["copies"], counts["host_accesses"]) > 25


# -- waits -------------------------------------------------------------------------------------


@contextmanager
def without_order(waits: Stream, of: Stream) -> Iterator[None]:
    plain = Streams.order

    def order(self: Streams, stream: Stream, handle: int, mark: int) -> None:
        if (stream, mark & 7) != (waits, of):
            plain(self, stream, handle, mark)

    with mock.patch.object(Streams, "order", order):
        yield


@contextmanager
def without_host_wait(in_class: type, method: str, wait: str = "synchronize") -> Iterator[None]:
    """Leave out the host's waits in a method."""
    plain = getattr(in_class, method)

    def without(self: object, *args: object) -> object:
        with mock.patch.object(Streams, wait, return_value=True):
            return plain(self, *args)

    with mock.patch.object(in_class, method, without):
        yield


@contextmanager
def without_wait_of_lookup(number: int) -> Iterator[None]:
    """Leave out one of the host's waits for a lookup that the GPU makes."""
    plain, plain_sorted = Streams.synchronize, LookupMaker._sorted

    def without(self: LookupMaker, *args: Any) -> object:
        waits = itertools.count()

        def synchronize(streams: Streams, mark: int) -> None:
            if next(waits) != number:
                plain(streams, mark)

        with mock.patch.object(Streams, "synchronize", synchronize):
            return plain_sorted(self, *args)

    with mock.patch.object(LookupMaker, "_sorted", without):
        yield


WAITS: dict[str, Callable] = {
    "lookup before its rows are filled": lambda: without_order(Stream.COMPUTE, Stream.UP),
    "lookup before its indices are there": lambda: without_order(Stream.COMPUTE, Stream.INDEX),
    "update of rows that are being copied out": lambda: without_order(Stream.COMPUTE, Stream.DOWN),
    "victims before their last update": lambda: without_order(Stream.DOWN, Stream.COMPUTE),
    "victims before they are filled": lambda: without_order(Stream.DOWN, Stream.UP),
    "fill before the victims have left": lambda: without_order(Stream.UP, Stream.DOWN),
    "fill of rows that are being used": lambda: without_order(Stream.UP, Stream.COMPUTE),
    "victims read by the host too early": lambda: without_host_wait(Departure, "arrive"),
    "staging used again too early": lambda: without_host_wait(Blocks, "take"),
    "indices used again too early": lambda: without_host_wait(Blocks, "take", "is_done"),
    "lookup before it is made": lambda: without_order(Stream.COMPUTE, Stream.SORT),
    "number of unique keys read by the host too early": lambda: without_wait_of_lookup(0),
    "unique keys read by the host too early": lambda: without_wait_of_lookup(1),
    "inverse read by the host too early": lambda: without_host_wait(MadeArrays, "bring"),
    "update's results read too early": lambda: without_host_wait(CudaRows, "_update"),
}


def wrong_without(context: Callable, order: str, seed: int) -> list[str]:
    gpu = fake_gpu()
    gpu.begin(order, seed, 1 + seed % len(Stream))
    with checked_views(), mock.patch.object(rows_module, "STAGING_BYTES", 256):
        device = FakeDevice()
        work = RandomWork(device, 8, 1, seed=seed)
        try:
            with context():
                work.do(80)
        except (AssertionError, GpuError):
            pass  # wrong values, too
        for stream in Stream:  # also what comes after a failure
            gpu.run(device.stream(stream))
        found = gpu.wrong
        device.abandon()
    return found


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_found(wait: str, order: str) -> None:
    found = [wrong_without(WAITS[wait], order, seed) for seed in range(6)]
    assert any(found), "the wait is not needed, or the checker does not see that it is"
    # Bytes that are not there yet may be taken for indices, and what fails then runs no more.
    signs = ("not ordered after", "outside of every array")
    assert all(any(sign in line for line in lines for sign in signs) for lines in found if lines)
    assert any(signs[0] in line for lines in found for line in lines)


@pytest.mark.parametrize("wait", ["is_done", "synchronize"])
def test_memory_that_is_given_back_too_early_is_found(wait: str) -> None:
    """Slots that are discarded, and rows that are gone."""
    gpu = fake_gpu()
    for leaves_out in (False, True):
        gpu.begin("lazy")
        with checked_views():
            device = FakeDevice()
            rows = device.allocate(1000, ROW)
            rows.commit(1000)
            rows.copy_in(first(1000), some(1000))
            with mock.patch.object(Streams, wait, return_value=True) if leaves_out else nullcontext():
                if wait == "is_done":
                    rows.discard(0)
                else:
                    del rows
            gpu.run(device.stream(Stream.UP))
            assert bool(gpu.wrong) == leaves_out
            assert all("outside of every array" in line for line in gpu.wrong)
            device.abandon()


@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_loaded_rows_that_is_used_again_too_early_is_found(waits: bool) -> None:
    gpu = fake_gpu()
    gpu.begin("lazy")
    with checked_views():
        device = FakeDevice()
        loaded = device.load(some(2000))  # more than a block of index arrays has
        args = core.LookupArgs(dim=8, slots=first(64), inverse=first(64))
        loaded.lookup_rows(args, device.share(np.zeros((64, 8), np.float32)), 8)
        del loaded
        with nullcontext() if waits else mock.patch.object(Operation, "wait_for"):
            device._give_back()
        gpu.run(device.stream(Stream.UP))
        rows = device.load(some(2000))
        for stream in Stream:
            gpu.run(device.stream(stream))
        assert bool(gpu.wrong) != waits
        assert all("not ordered after" in line for line in gpu.wrong)
        device.abandon()
        del rows


@pytest.mark.parametrize("order", ORDERS)
def test_computing_never_waits(order: str) -> None:
    """Neither while rows move, nor however many lookups the GPU has not begun."""
    with fake_device(order, seed=5) as device:
        rows = device.allocate(64, ROW)
        rows.commit(64)
        rows.copy_in(first(64), some(64))
        step = core.OptimizerStep(kind=1, lr=0.1)
        out, grad = np.zeros((20, 8), np.float32), np.ones((20, 8), np.float32)
        out_at, grad_at = device.share(out), device.share(grad)
        inverse = first(20)
        start, positions = core.build_csr(inverse, 20)
        before, blocks = fake_gpu().waits, device.parts.indices.nbytes
        for turn in range(30):
            slots = (first(20) + 2 * turn % 40).astype(np.int32)
            rows.lookup_rows(core.LookupArgs(dim=8, slots=slots, inverse=inverse), out_at, 8)
            args = core.UpdateArgs(dim=8, slots=slots, csr_start=start, csr_positions=positions, step=step)
            rows.update_rows(args, grad_at, 8)
            rows.move(slots[:2], (slots[:2] + 20).astype(np.int32))
        assert fake_gpu().waits == before
        assert device.parts.indices.nbytes > blocks or order != "lazy"
        device.synchronize()
        made = device.parts.indices.nbytes
        for _ in range(5):
            rows.lookup_rows(core.LookupArgs(dim=8, slots=slots, inverse=inverse), out_at, 8)
            device.synchronize()
        assert device.parts.indices.nbytes == made  # blocks are used again
        del rows


def test_a_plan_waits_for_its_victims_alone() -> None:
    """Copying rows out runs what their last use needs, and no later computation on other rows."""
    with fake_device("lazy") as device:
        rows = device.allocate(64, ROW)
        rows.commit(64)
        rows.copy_in(first(64), some(64))
        out = np.zeros((4, 8), np.float32)
        at = device.share(out)
        args = core.LookupArgs(dim=8, slots=first(4), inverse=first(4))
        rows.lookup_rows(args, at, 8)
        rows.copy_out((first(4) + 8).astype(np.int32), np.zeros((4, ROW), np.uint8))
        assert not out.any()  # the lookup has not run
        rows.copy_out(first(4), np.zeros((4, ROW), np.uint8))
        assert out.any()
        del rows


def updates_by_two_streams(device: FakeDevice) -> tuple[CudaRows, np.ndarray, np.ndarray]:
    """Return rows, which four updates by changing streams have changed, as the GPU has them and the host."""
    current: list[int] = []
    a, b = device.stream(Stream.DOWN), device.stream(Stream.COMPUTE)
    device.streams._compute = lambda: current[-1]
    rows, data = device.allocate(8, ROW), some(8)
    rows.commit(8)
    rows.copy_in(first(8), data)
    grad = np.ones((8, 8), np.float32)
    at = device.share(grad)
    start, positions = core.build_csr(first(8), 8)
    args = core.UpdateArgs(
        dim=8, slots=first(8), csr_start=start, csr_positions=positions,
        step=core.OptimizerStep(kind=0, lr=0.5),
    )  # fmt: skip
    expected = core.HostRows.view(data)
    for stream in (a, b, b, a):
        current.append(stream)
        rows.update_rows(args, at, 8)
        expected.update_rows(args, grad.ctypes.data, 8)
    out = np.zeros_like(data)
    rows.copy_out(first(8), out)
    return rows, out, data


@pytest.mark.parametrize("order", ORDERS)
def test_the_current_stream_may_change(order: str) -> None:
    """Operations of one caller follow each other, whichever stream is current."""
    with fake_device(order) as device:
        rows, out, expected = updates_by_two_streams(device)
        np.testing.assert_array_equal(out, expected)
        del rows


def test_a_change_of_streams_without_a_wait_is_found() -> None:
    fake_gpu().begin("lazy")
    with checked_views(), mock.patch.object(Streams, "_follow"):
        device = FakeDevice()
        rows, *_ = updates_by_two_streams(device)
        fake_gpu().run(device.stream(Stream.COMPUTE))
        assert any("update_singles" in line and "not ordered after" in line for line in fake_gpu().wrong)
        device.abandon()
        del rows


def test_a_graph_that_is_being_captured_is_refused() -> None:
    with fake_device() as device:
        rows = device.allocate(8, ROW)
        rows.commit(8)
        rows.copy_in(first(8), some(8))
        stream = device.stream(Stream.COMPUTE)
        device.streams._compute = lambda: stream
        fake_gpu().set_capturing(stream, True)
        args = core.LookupArgs(dim=8, slots=first(8), inverse=first(8))
        out = np.zeros((8, 8), np.float32)
        at = device.share(out)
        with pytest.raises(GpuError, match=r"CUDA graph is being captured.*torch\.cuda\.graph"):
            rows.lookup_rows(args, at, 8)
        assert not out.any()
        fake_gpu().set_capturing(stream, False)
        rows.lookup_rows(args, at, 8)
        del rows


@pytest.mark.parametrize("order", ORDERS)
def test_discarded_memory_comes_back(order: str) -> None:
    """4,096 bytes are the fake's pages."""
    with fake_device(order) as device:
        rows, data = device.allocate(1024, ROW), some(1024)
        rows.commit(512)
        half = fake_gpu().alive[0]
        rows.commit(1024)
        rows.copy_in(first(1024), data)
        all_ = fake_gpu().alive[0]
        rows.discard(512)
        if order == "lazy":
            assert fake_gpu().alive[0] == all_  # the rows are on their way
        device.synchronize()
        rows.commit(1024)  # nothing more is taken, and what can be given back is
        assert fake_gpu().alive[0] - half < all_ - half
        rows.copy_in(first(1024)[-2:], data[:2])
        out = np.zeros((514, ROW), np.uint8)
        rows.copy_out(np.append(first(512), first(1024)[-2:]), out)
        np.testing.assert_array_equal(out, np.concatenate([data[:512], data[:2]]))
        rows.discard(512)
        rows.copy_in(first(1024)[512:], data[512:])  # before it could be given back
        rows.copy_out(first(1024)[510:1024], out)
        np.testing.assert_array_equal(out, data[510:])
        del rows


@pytest.mark.parametrize("order", ORDERS)
def test_threads_work_on_rows_of_their_own(order: str) -> None:
    with fake_device(order, seed=2) as device:
        works = [RandomWork(device, 8, 1, seed=seed) for seed in range(3)]
        errors: list[BaseException] = []

        def work(one: RandomWork) -> None:
            try:
                one.do(25)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(one,)) for one in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        del works, threads


def test_rows_that_are_gone_give_their_memory_back() -> None:
    with fake_device("lazy") as device:
        rows = device.allocate(64, ROW)
        rows.commit(64)
        rows.copy_in(first(64), some(64))
        loaded = device.load(some(64))
        out = np.zeros((64, 8), np.float32)
        args = core.LookupArgs(dim=8, slots=first(64), inverse=first(64))
        loaded.lookup_rows(args, device.share(out), 8)
        before = fake_gpu().alive[0]
        del rows, loaded
        assert fake_gpu().alive[0] < before
        device.synchronize()
        made = device.parts.indices.nbytes
        again = device.load(some(64))
        assert device.parts.indices.nbytes == made  # in the block of the rows that are gone
        del again
        np.testing.assert_array_equal(out, some(64)[:, :32].copy().view(np.float32).reshape(64, 8))


def test_kernels_are_compiled_once_and_kept(tmp_path: Path) -> None:
    def opened(nvrtc: Sequence[str] | None) -> FakeDevice:
        return FakeDevice(libraries=Libraries(fake_gpu().path, nvrtc, CubinCache(tmp_path)))

    fake_gpu().begin("random", 3)
    kernels_are_kept(opened, [str(shared_library("fake_nvrtc"))], tmp_path)
    assert fake_gpu().wrong == []
    fake_gpu().forget()
