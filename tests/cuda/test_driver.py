"""What can be wrong with a GPU, its driver or a kernel is one named error each."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_device import FakeDevice, checked_views, fake_device
from tierstore import ClosedError, ConfigError, GpuError
from tierstore import _core as core
from tierstore.cache.tiers.memory import MemoryTier, TierPlan
from tierstore.cuda.device import CudaDevice, Libraries
from tierstore.cuda.driver import CallError
from tierstore.cuda.streams import Operation, Stream, Streams

ROW = 48


def libraries(driver: str) -> Libraries:
    return Libraries(driver, [])


def test_no_driver_is_named() -> None:
    with pytest.raises(GpuError, match=r"no NVIDIA driver is here: .*libcuda-nowhere.*Install"):
        CudaDevice(libraries=libraries("libcuda-nowhere.so.1"))


def test_a_library_that_is_no_driver_is_named() -> None:
    with pytest.raises(GpuError, match=r"libc.so.6 lacks cuDriverGetVersion"):
        CudaDevice(libraries=libraries("libc.so.6"))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (
            lambda gpu: gpu.set_driver(version=11080),
            r"is for CUDA 11\.8, .* for CUDA 12\.0 or later.*newer driver",
        ),
        (
            lambda gpu: gpu.set_driver(devices=0),
            r"no GPU can be used: .*CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES",
        ),
        (
            lambda gpu: gpu.fail("cuInit", 999),
            "no GPU can be used: cuInit failed in the NVIDIA driver: error 999",
        ),
        (lambda gpu: gpu.fail("cuDeviceGetAttribute", 1), "cuDeviceGetAttribute .* CUDA_ERROR_INVALID_VALUE"),
        (lambda gpu: gpu.fail("cuDevicePrimaryCtxRetain", 2), "cuDevicePrimaryCtxRetain .*OUT_OF_MEMORY"),
    ],
)
def test_what_is_wrong_with_the_driver_is_named(setup: Callable, message: str) -> None:
    gpu = fake_gpu()
    gpu.begin()
    setup(gpu)
    with pytest.raises(GpuError, match=message):
        FakeDevice()
    gpu.begin()
    assert gpu.alive == (0, 0)


def test_a_gpu_that_is_not_there_is_named() -> None:
    fake_gpu().begin()
    with pytest.raises(GpuError, match="there is no GPU number 1: the driver shows 1"):
        FakeDevice(index=1)


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(CallError("no", 2)))
    assert (str(error), error.code) == ("no", 2)


def test_a_gpu_without_a_compiler_for_it_is_named() -> None:
    with fake_device() as device:
        rows = device.allocate(4, ROW)
        device.parts.kernels._cubins.architecture = 52
        with pytest.raises(GpuError, match=r"does not compile for this GPU \(sm_52\)"):
            rows.copy_in(np.zeros(1, np.int32), np.zeros((1, ROW), np.uint8))
        del rows


def test_an_image_that_the_driver_refuses_is_compiled_again() -> None:
    with fake_device() as device:
        rows = device.allocate(4, ROW)
        rows.commit(4)
        fake_gpu().fail("cuModuleLoadData", 209)
        data = np.arange(ROW, dtype=np.uint8).reshape(1, ROW)
        rows.copy_in(np.zeros(1, np.int32), data)
        out = np.zeros_like(data)
        rows.copy_out(np.zeros(1, np.int32), out)
        np.testing.assert_array_equal(out, data)
        fake_gpu().fail("cuModuleLoadData", 1)
        with pytest.raises(GpuError, match=r"cuModuleLoadData .*INVALID_VALUE"):
            rows.lookup_rows(
                core.LookupArgs(dim=8, slots=np.zeros(1, np.int32), inverse=np.zeros(1, np.int32)), 16, 8
            )
        del rows


def test_a_tier_that_the_gpu_has_no_room_for_is_refused_with_both_numbers() -> None:
    with fake_device() as device:
        fake_gpu().set_memory(1 << 20)
        plan = TierPlan(100_000, False, device=device)
        with pytest.raises(
            ConfigError, match=r"hbm: .*4\.578 MiB of GPU memory are needed, and 1 MiB of 1 MiB"
        ):
            MemoryTier("hbm", plan, ROW, "lru", tables=1)
        assert fake_gpu().alive[0] == 0


def test_growth_that_the_gpu_has_no_room_for_changes_nothing() -> None:
    with fake_device() as device:
        rows, data = device.allocate(1 << 20, ROW), np.arange(4 * ROW, dtype=np.uint8).reshape(4, ROW)
        rows.commit(4)
        rows.copy_in(np.arange(4, dtype=np.int32), data)
        before = fake_gpu().alive
        fake_gpu().set_memory(before[0] + (1 << 20))
        for fails in (None, "cuMemCreate"):  # the first is seen before it is asked for
            if fails:
                fake_gpu().set_memory(1 << 30)
                fake_gpu().fail(fails, 2)
            with pytest.raises(
                core.AddressSpaceError, match=r"(47\.99\d|48) MiB of GPU memory are needed, and .* are free"
            ):
                rows.commit(1 << 20)
            assert fake_gpu().alive == before
        out = np.zeros_like(data)
        rows.copy_out(np.arange(4, dtype=np.int32), out)
        np.testing.assert_array_equal(out, data)
        before = fake_gpu().alive
        for fails in ("cuMemMap", "cuMemSetAccess"):
            fake_gpu().fail(fails, 1)
            with pytest.raises(GpuError, match=fails):
                rows.commit(1 << 20)
            assert fake_gpu().alive == before
        rows.commit(1 << 20)
        rows.copy_in(np.array([(1 << 20) - 1], np.int32), data[:1])
        del rows


def test_staging_that_the_gpu_has_no_room_for_is_named() -> None:
    with fake_device() as device:
        rows = device.allocate(4, ROW)
        rows.commit(4)
        fake_gpu().fail("cuMemAlloc", 2)
        before = fake_gpu().alive
        with pytest.raises(GpuError, match=r"64 KiB of GPU memory are needed, and .* free; lower hbm"):
            rows.move(np.array([0], np.int32), np.array([1], np.int32))
        assert fake_gpu().alive[0] == before[0]
        del rows


@pytest.mark.parametrize("order", ["eager", "lazy"])
def test_a_kernel_that_fails_is_named_by_the_next_call(order: str) -> None:
    gpu = fake_gpu()
    gpu.begin(order)
    with checked_views():
        device = FakeDevice()
        rows = device.allocate(8, ROW)
        rows.commit(8)
        slots, data = np.arange(2, dtype=np.int32), np.zeros((2, ROW), np.uint8)
        rows.copy_in(slots, data)
        rows.copy_out(slots, data)
        gpu.fail_kernel("init_rows")
        one = np.ones(1, np.float32)
        values = core.InitialValues(
            dim=8, state_floats=0, state_value=0, kinds=np.zeros(1, np.uint8), first=one, second=one,
            seeds=np.zeros(1, np.uint64),
        )  # fmt: skip
        keys = np.arange(2, dtype=np.uint64)
        if order == "lazy":
            rows.initialise(values, slots, keys)  # fails later
        with pytest.raises(GpuError, match=r"a kernel has failed .*LAUNCH_FAILED.*not ended: .*init_rows"):
            rows.initialise(values, slots, keys) if order == "eager" else rows.copy_out(slots, data)
        for _ in range(2):  # and so says each later call
            with pytest.raises(GpuError, match="init_rows"):
                rows.copy_in(slots, data)
        with pytest.raises(GpuError, match="init_rows"):
            device.synchronize()
        del rows
        device.close()
        with pytest.raises(ClosedError, match="the GPU device is closed"):
            device.synchronize()
    gpu.begin()


@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuEventRecord"])
def test_a_wait_that_is_refused_ends_the_use_of_the_device(call: str) -> None:
    """What came later would not be in order."""
    fake_gpu().begin("lazy")
    with checked_views():
        device = FakeDevice()
        rows = device.allocate(8, ROW)
        rows.commit(8)
        slots, data = np.arange(2, dtype=np.int32), np.ones((2, ROW), np.uint8)
        rows.copy_in(slots, data)
        fake_gpu().fail(call, 1)
        with pytest.raises(GpuError, match=rf"{call} failed .* Kernels that had not ended: move_rows"):
            rows.copy_out(slots, data)
        for _ in range(2):
            with pytest.raises(GpuError, match=f"{call} failed"):
                rows.copy_out(slots, data)
        device.abandon()
        del rows


def test_another_thread_may_capture_a_graph_meanwhile() -> None:
    """Of dense layers: the driver then refuses calls for memory and questions for events, unless a thread
    says that they are no part of a graph."""
    with fake_device("random") as device:
        captured = device.stream(Stream.INDEX)
        fake_gpu().set_capturing(captured, True)
        rows = device.allocate(1 << 16, ROW)
        for slots in np.arange(1 << 16, dtype=np.int32).reshape(4, -1):
            rows.commit(int(slots[-1]) + 1)
            data, out = np.full((8, ROW), slots[0] % 251, np.uint8), np.zeros((8, ROW), np.uint8)
            rows.copy_in(slots[:8], data)
            rows.copy_out(slots[:8], out)
            np.testing.assert_array_equal(out, data)
        fake_gpu().set_capturing(captured, False)
        del rows


def test_a_thread_has_its_own_mode_of_capture_again() -> None:
    with fake_device() as device:
        with device.streams.context, device.streams.context:
            pass
        fake_gpu().set_capturing(device.stream(Stream.INDEX), True)
        with pytest.raises(CallError, match="900"):
            device.streams.driver.call("cuMemAlloc_v2", None, 1)
        fake_gpu().set_capturing(device.stream(Stream.INDEX), False)


def test_a_launch_that_is_refused_leaves_the_device_usable() -> None:
    with fake_device() as device:
        rows = device.allocate(8, ROW)
        rows.commit(8)
        slots, data = np.arange(2, dtype=np.int32), np.ones((2, ROW), np.uint8)
        fake_gpu().fail("cuLaunchKernel", 701)
        with pytest.raises(GpuError, match="cuLaunchKernel of move_rows failed"):
            rows.copy_in(slots, data)
        rows.copy_in(slots, data)
        out = np.zeros_like(data)
        rows.copy_out(slots, out)
        np.testing.assert_array_equal(out, data)
        del rows


def test_an_interrupt_while_an_operation_is_given_leaves_the_device_usable() -> None:
    plain = Streams._record
    interrupts = [KeyboardInterrupt]

    def record(self: Streams, operation: Operation) -> None:
        if interrupts:
            raise interrupts.pop()
        plain(self, operation)

    with fake_device("lazy") as device, mock.patch.object(Streams, "_record", record):
        rows = device.allocate(8, ROW)
        rows.commit(8)
        slots, data, out = (
            np.arange(2, dtype=np.int32),
            np.ones((2, ROW), np.uint8),
            np.zeros((2, ROW), np.uint8),
        )
        with pytest.raises(KeyboardInterrupt):
            rows.copy_in(slots, data)
        rows.copy_out(slots, out)
        np.testing.assert_array_equal(out, data)
        del rows


@pytest.mark.parametrize("call", ["cuMemFreeHost", "cuMemFree", "cuModuleUnload"])
def test_memory_that_could_not_be_given_back_is_not_freed_twice(call: str) -> None:
    """Another library may have its address by then; what is left is given back by another close()."""
    fake_gpu().begin()
    with checked_views():
        device = FakeDevice()
        rows = device.allocate(8, ROW)
        rows.commit(8)
        rows.move(np.array([0], np.int32), np.array([1], np.int32))
        rows.copy_in(np.array([0], np.int32), np.zeros((1, ROW), np.uint8))
        del rows
        fake_gpu().fail(call, 1)
        with pytest.raises(GpuError, match=call):
            device.close()
        device.close()
        assert fake_gpu().wrong == []
    fake_gpu().forget()  # what the call that failed has left


def test_weights_that_kernels_do_not_compute_on_are_refused() -> None:
    with fake_device() as device:
        for place in (device, device.uvm("pinned")):
            for make in (
                lambda at: at.allocate(4, ROW, "int8"),
                lambda at: at.load(np.zeros((1, ROW), np.uint8), "half"),
            ):
                with pytest.raises(
                    ValueError, match=r"kernels do not work on (int8|half) weights, only on fp32"
                ):
                    make(place)


def test_arguments_of_rows_of_16_bits_that_do_not_fit() -> None:
    """As on the host: rows that are too small, keys that do not go with the slots, other forms of rows."""
    codec = core.RowCodec(weights="bf16", state="fp32", dim=8, state_floats=0)
    slots, keys = np.zeros(1, np.int32), np.zeros(2, np.uint64)
    start, positions = core.build_csr(slots, 1)
    rounding = core.UpdateRounding(keys=keys, seeds=np.zeros(1, np.uint64))

    def args(dim: int) -> core.UpdateArgs:
        step = core.OptimizerStep(kind=1, lr=0.1)
        return core.UpdateArgs(dim=dim, slots=slots, csr_start=start, csr_positions=positions, step=step)

    for where in (None, "hbm", "uvm"):
        with fake_device() as device:
            place = device.uvm("pinned") if where == "uvm" else device
            rows = place.allocate(2, 32, "bf16") if where else core.HostRows(2, 32, "bf16")
            rows.commit(2)
            with pytest.raises(ValueError, match="row_bytes is smaller"):
                rows.update_rows(args(15), 0, 16)
            with pytest.raises(ValueError, match="keys and slots differ"):
                rows.update_rows(args(8), 0, 16, rounding)
            with pytest.raises(ValueError, match="only rows with float32 weights"):
                rows.encode(codec, keys, np.zeros((2, 16), np.uint8))
            with pytest.raises(ValueError, match="only rows with float32 weights"):
                rows.decode(codec, np.zeros((2, 16), np.uint8))
            del rows


def test_a_closed_device_is_named() -> None:
    with fake_device() as device:
        pass
    device.close()
    with pytest.raises(ClosedError, match="closed"):
        device.allocate(4, ROW)


def test_a_forked_child_leaves_the_device_alone() -> None:
    with fake_device() as device:
        rows = device.allocate(4, ROW)
        rows.commit(4)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rows.copy_out(np.zeros(1, np.int32), np.zeros((1, ROW), np.uint8))
            except ClosedError:
                del rows
                device.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        rows.copy_in(np.zeros(1, np.int32), np.zeros((1, ROW), np.uint8))
        del rows
