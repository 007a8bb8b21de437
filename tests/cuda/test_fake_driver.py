"""The fake driver reports what is wrong, and nothing else: each fault beside the same work without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref, c_int

import numpy as np
import pytest

from tests.cuda.fake import ORDERS, FakeGpu, fake_gpu
from tierstore.cuda.driver import (
    AccessDescription,
    AllocationProperties,
    CallError,
    Driver,
    MemoryLocation,
)
from tierstore.errors import GpuError

SIZE = 4096


class Bare:
    """Two streams, an event, and memory on each side; the calls as they are."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.call = driver, driver.call
        context = driver.handle("cuDevicePrimaryCtxRetain", driver.open_device(0))
        self.call("cuCtxPushCurrent_v2", context)
        self.a, self.b = (driver.handle("cuStreamCreateWithPriority", 1, 0) for _ in range(2))
        self.event = driver.handle("cuEventCreate", 2)
        self.pinned = driver.handle("cuMemHostAlloc", SIZE, 3)
        self.device, self.other = (driver.address("cuMemAlloc_v2", SIZE) for _ in range(2))

    def copy(self, target: int, source: int, stream: int, size: int = SIZE) -> None:
        self.call("cuMemcpyAsync", target, source, size, stream)

    def order(self, waits: int, of: int) -> None:
        self.call("cuEventRecord", self.event, of)
        self.call("cuStreamWaitEvent", waits, self.event, 0)

    def finish(self, stream: int) -> None:
        self.call("cuEventRecord", self.event, stream)
        self.call("cuEventSynchronize", self.event)

    def close(self) -> None:
        for stream in (self.a, self.b):
            self.finish(stream)
            self.call("cuStreamDestroy_v2", stream)
        self.call("cuEventDestroy_v2", self.event)
        for address in (self.device, self.other):
            if address:
                self.call("cuMemFree_v2", address)
        self.call("cuMemFreeHost", self.pinned)
        self.driver.handle("cuCtxPopCurrent_v2")
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


@pytest.fixture(params=ORDERS)
def gpu(request: pytest.FixtureRequest) -> FakeGpu:
    gpu = fake_gpu()
    gpu.begin(request.param)
    return gpu


@pytest.fixture
def bare(gpu: FakeGpu) -> Iterator[Bare]:
    gpu.run(0)  # the driver's own stream, which any test may have made before, takes no number of another's
    bare = Bare(Driver(gpu.path))
    yield bare
    bare.close()
    assert gpu.alive == (0, 0)
    gpu.begin()


def two_writes(bare: Bare, ordered: bool) -> None:
    bare.copy(bare.device, bare.pinned, bare.a)
    if ordered:
        bare.order(bare.b, bare.a)
    bare.copy(bare.device, bare.other, bare.b)


def write_under_a_read(bare: Bare, ordered: bool) -> None:
    bare.copy(bare.other, bare.device, bare.a)
    if ordered:
        bare.order(bare.b, bare.a)
    bare.copy(bare.device, bare.pinned, bare.b)


def last_byte(bare: Bare, ordered: bool) -> None:
    bare.copy(bare.device, bare.pinned, bare.a, SIZE)
    bare.copy(bare.pinned if ordered else bare.other, bare.device + SIZE - 16, bare.a, 16)
    if ordered:
        bare.order(bare.b, bare.a)
    bare.copy(bare.other, bare.device + SIZE - 1, bare.b, 1)


def host_write(bare: Bare, ordered: bool) -> None:
    bare.copy(bare.device, bare.pinned, bare.a)
    if ordered:
        bare.finish(bare.a)
    fake_gpu().touch(bare.pinned, SIZE, True)


def host_read(bare: Bare, ordered: bool) -> None:
    bare.copy(bare.pinned, bare.device, bare.a)
    if ordered:
        bare.finish(bare.a)
    fake_gpu().touch(bare.pinned + 8, 4, False)


def order_by_an_earlier_event(bare: Bare, ordered: bool) -> None:
    """What is recorded before a copy says nothing of the copy."""
    if not ordered:
        bare.call("cuEventRecord", bare.event, bare.a)
    bare.copy(bare.device, bare.pinned, bare.a)
    if ordered:
        bare.call("cuEventRecord", bare.event, bare.a)
    bare.call("cuStreamWaitEvent", bare.b, bare.event, 0)
    bare.copy(bare.other, bare.device, bare.b)


def free_in_use(bare: Bare, ordered: bool) -> None:
    bare.copy(bare.other, bare.device, bare.a)
    if ordered:
        bare.finish(bare.a)
    bare.call("cuMemFree_v2", bare.device)
    bare.device = 0


@pytest.mark.parametrize(
    "work",
    [
        two_writes,
        write_under_a_read,
        last_byte,
        host_write,
        host_read,
        order_by_an_earlier_event,
        free_in_use,
    ],
)
def test_what_is_not_ordered_is_found(work: Callable, bare: Bare, gpu: FakeGpu) -> None:
    work(bare, True)
    bare.finish(bare.a)
    bare.finish(bare.b)
    assert gpu.wrong == []
    if work is free_in_use:
        bare.device = bare.driver.address("cuMemAlloc_v2", SIZE)
    work(bare, False)
    bare.finish(bare.b)
    bare.finish(bare.a)
    assert len(gpu.wrong) >= 1
    assert all("not ordered after" in line or "freed" in line for line in gpu.wrong)


def test_two_reads_need_no_order(bare: Bare, gpu: FakeGpu) -> None:
    target = bare.driver.address("cuMemAlloc_v2", SIZE)
    bare.copy(target, bare.device, bare.a)
    bare.copy(bare.other, bare.device, bare.b)
    bare.finish(bare.a)
    bare.finish(bare.b)
    bare.call("cuMemFree_v2", target)
    assert gpu.wrong == []


def test_a_copy_of_memory_that_is_freed_meanwhile_is_found() -> None:
    gpu = fake_gpu()
    gpu.begin("lazy")
    bare = Bare(Driver(gpu.path))
    bare.copy(bare.other, bare.device, bare.a)
    bare.call("cuMemFree_v2", bare.device)
    bare.device = 0
    bare.close()
    assert any("freed or not its own" in line for line in gpu.wrong)
    assert gpu.counts["whole_waits"] == 1
    gpu.begin()


def test_copies_stay_inside_of_their_memory(bare: Bare) -> None:
    for target, source, size in [
        (bare.device, bare.pinned, SIZE + 1),
        (bare.device - 1, bare.pinned, 16),
        (bare.device, np.zeros(16).ctypes.data, 16),
    ]:
        with pytest.raises(CallError, match=r"cuMemcpyAsync .*INVALID_VALUE"):
            bare.copy(target, source, bare.a, size)


def test_orders_differ(bare: Bare, gpu: FakeGpu, request: pytest.FixtureRequest) -> None:
    order = request.node.callspec.params["gpu"]
    for _ in range(20):
        bare.copy(bare.device, bare.pinned, bare.a, 16)
        bare.copy(bare.other, bare.other + 64, bare.b, 16)
    done = []
    for stream in (bare.a, bare.b):
        event = bare.driver.handle("cuEventCreate", 2)
        bare.call("cuEventRecord", event, stream)
        done.append(bare.driver.is_done(event))
        bare.call("cuEventDestroy_v2", event)
    expected = {"eager": [True, True], "lazy": [False, False], "starve": [False, True]}
    assert done == expected.get(order, done)
    before = gpu.waits
    bare.finish(bare.a)
    assert gpu.waits - before == (order in ("lazy", "starve")) or order == "random"


def test_mapped_memory_follows_the_rules(bare: Bare, gpu: FakeGpu) -> None:
    location = MemoryLocation(1, 0)
    properties = AllocationProperties(type=1, location=location)
    access = AccessDescription(location, 3)
    base = bare.driver.address("cuMemAddressReserve", 4 * SIZE, 0, 0, 0)
    handle = bare.driver.address("cuMemCreate", SIZE, byref(properties), 0)
    with pytest.raises(CallError):
        bare.driver.address("cuMemCreate", SIZE + 1, byref(properties), 0)
    with pytest.raises(CallError):
        bare.call("cuMemMap", base + 4 * SIZE, SIZE, 0, handle, 0)
    bare.call("cuMemMap", base, SIZE, 0, handle, 0)
    with pytest.raises(CallError, match="cuMemcpyAsync"):
        bare.copy(base, bare.pinned, bare.a)  # nobody may access it yet
    bare.call("cuMemSetAccess", base, SIZE, byref(access), 1)
    bare.copy(base, bare.pinned, bare.a)
    with pytest.raises(CallError):
        bare.call("cuMemRelease", handle)
    bare.finish(bare.a)
    bare.call("cuMemUnmap", base, SIZE)
    bare.call("cuMemRelease", handle)
    bare.call("cuMemAddressFree", base, 4 * SIZE)
    assert gpu.wrong == []


def test_calls_need_a_context() -> None:
    gpu = fake_gpu()
    gpu.begin()
    driver = Driver(gpu.path)
    with pytest.raises(GpuError, match="INVALID_CONTEXT"):
        driver.address("cuMemAlloc_v2", SIZE)
    with pytest.raises(GpuError, match="INVALID_CONTEXT"):
        driver.memory()


def test_memory_is_counted(bare: Bare, gpu: FakeGpu) -> None:
    free, total = bare.driver.memory()
    assert (total, total - free) == (1 << 30, 2 * SIZE)
    gpu.set_memory(3 * SIZE)
    with pytest.raises(CallError, match="OUT_OF_MEMORY"):
        bare.driver.address("cuMemAlloc_v2", SIZE + 1)
    more = bare.driver.address("cuMemAlloc_v2", SIZE)
    assert bare.driver.memory() == (0, 3 * SIZE)
    bare.call("cuMemFree_v2", more)


def test_images_are_of_one_architecture(bare: Bare) -> None:
    for image, error in [
        (b"\x7fELF", "INVALID_IMAGE"),
        (b"fake cubin\n--gpu-architecture=sm_80\n", "NO_BINARY_FOR_GPU"),
    ]:
        with pytest.raises(CallError, match=error):
            bare.driver.handle("cuModuleLoadData", image)
    module = bare.driver.handle("cuModuleLoadData", b"fake cubin\n--gpu-architecture=sm_90\n")
    assert bare.driver.handle("cuModuleGetFunction", module, b"move_rows")
    for name in (b"lookup_rows", b"update_cold", b"nothing"):
        with pytest.raises(CallError, match="NOT_FOUND"):
            bare.driver.handle("cuModuleGetFunction", module, name)
    bare.call("cuModuleUnload", module)


def test_the_version_is_told() -> None:
    gpu = fake_gpu()
    gpu.begin()
    driver = Driver(gpu.path)
    assert driver.version == 13000
    major = c_int()
    driver.call("cuDeviceGetAttribute", byref(major), 75, 0)
    assert major.value == 9
