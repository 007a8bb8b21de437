"""torch for CUDA on the fake driver: tensors that say they are on a GPU, and refuse others that are not.

Their memory is the process's, and torch computes on it at once. A kernel of ours whose result torch reads has
run by then, since torch's operations follow it in the current stream; so this shows which tensors meet which,
and not what orders torch's own work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_device import FakeDevice, checked_views
from tests.cuda.loaded_parts import loaded_parts
from tierstore.cuda import rows
from tierstore.cuda.compute import CudaRows
from tierstore.cuda.streams import Stream
from tierstore.modules import gpu as opening
from tierstore.modules import gradient_hooks

_kept: dict[int, torch.UntypedStorage] = {}
"""Memory whose addresses kernels may still use, by its number in torch."""
_keeping = threading.RLock()
_OF_GPU = 1 << 62
"""Is added to addresses of the GPU's memory, so that the host cannot read or write there."""


def finish() -> None:
    """Run what the current stream was given, then free memory that nobody held when this was called.

    As with torch's allocator, memory comes back when what the stream was given before it was freed is done.
    Memory that is still held may belong to a kernel that its thread has not launched yet.
    """
    with _keeping:
        left = [number for number in _kept if torch._C._storage_Use_Count(number) == 1]
        fake_gpu().run(0)
        for number in left:
            storage = _kept.pop(number)
            if storage.resizable():  # torch's own
                storage.fill_(0xEE)  # type: ignore[no-untyped-call]


def _keep(tensor: torch.Tensor) -> None:
    with _keeping:
        storage = tensor.untyped_storage()
        _kept[storage._cdata] = storage


_MIXES = {"aten::copy_", "aten::_index_put_impl_", "aten::index", "aten::index_put", "aten::index_put_"}
"""Operations of torch that take tensors of several devices."""


class Watch(Protocol):
    """Is told what touches the memory of tensors (tests/cuda/fake_streams.py)."""

    def touch(self, tensor: GpuTensor, *, write: bool, waits: bool = False) -> None:
        """The current stream of the tensor's GPU reads or writes it; the host waits for that if it
        ``waits``."""
        ...

    def record(self, tensor: GpuTensor, stream: Any) -> None:
        """The allocator is told that ``stream`` uses the tensor."""
        ...


watch: Watch | None = None


def _touched(given: Iterable[torch.Tensor], *, write: bool = False, waits: bool = False) -> None:
    for tensor in given:
        if watch is not None and isinstance(tensor, GpuTensor):
            watch.touch(tensor, write=write, waits=waits)


class GpuTensor(torch.Tensor):
    """A tensor on a GPU that is not there; ``inner`` has its numbers."""

    inner: torch.Tensor
    number: int

    @staticmethod
    def __new__(cls, inner: torch.Tensor, number: int) -> GpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            requires_grad=False,
        )
        made.inner, made.number = inner, number
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def data_ptr(self) -> int:
        _touched([self], write=True)
        _keep(self.inner)
        return self.inner.data_ptr() and self.inner.data_ptr() + _OF_GPU

    def cpu(self, *_: Any) -> torch.Tensor:
        return moved(self, torch.device("cpu"), None)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return FakeCuda._to(torch.Tensor.to, self, *args, **kwargs)

    def record_stream(self, stream: Any) -> None:
        if watch is not None:
            watch.record(self, stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list(_tensors_in((args, kwargs)))
        numbers = {t.number for t in given if isinstance(t, cls)}
        # Autograd makes empty gradients of unused outputs where it believes the tensors to be: on the CPU.
        strangers = [t for t in given if not isinstance(t, cls) and t.dim() and t.numel()]
        # So does DDP with the memory in which it sends gradients.
        into = kwargs.get("out")
        to_bucket = func._schema.name == "aten::mul" and into is not None and not isinstance(into, cls)
        strangers = [t for t in strangers if not (to_bucket and t is into)]
        if len(numbers) > 1 or (strangers and func._schema.name not in _MIXES):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} gets others as well")
        finish()
        out = func(*_mapped(_inner, args), **_mapped(_inner, kwargs))
        wrapped = _mapped(lambda t: cls(t, min(numbers)), out)
        if not func.is_view:
            _touched(given)
            _touched(_tensors_in(wrapped), write=True)
        if func._schema.name == "aten::copy_" and not isinstance(args[0], cls):
            return args[0]
        if to_bucket:
            return into
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, GpuTensor) else tensor


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """Of the arguments or results of an operation; torch's own functions for all trees take much longer."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(part)


def _mapped(change: Callable[[Any], torch.Tensor], given: Any) -> Any:
    """``given`` with all of its tensors changed."""
    if isinstance(given, torch.Tensor):
        return change(given)
    if isinstance(given, dict):
        return {name: _mapped(change, part) for name, part in given.items()}
    if isinstance(given, list | tuple):
        return type(given)([_mapped(change, part) for part in given])
    return given


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ctx.back = tensor.device, tensor.dtype
        finish()
        inner = tensor.inner if isinstance(tensor, GpuTensor) else tensor
        copy = inner.detach().to(dtype, copy=True)
        _touched([tensor], waits=device.type == "cpu")
        if device.type == "cpu":
            return copy
        made = GpuTensor(copy, device.index or 0)
        _touched([made], write=True)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return moved(grads[0], *ctx.back), None, None


def moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    """``tensor.to(device, dtype)``"""
    dtype = dtype or tensor.dtype
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    return tensor if (tensor.device, tensor.dtype) == (device, dtype) else _Moved.apply(tensor, device, dtype)


def _is_gpu(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class FakeCuda(TorchFunctionMode):
    """Lets ``device="cuda"`` and ``to("cuda")`` give tensors of the fake GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return self._to(func, *args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        device = kwargs.get("device")
        if not _is_gpu(device):
            return func(*args, **kwargs)
        if func is torch.ops.aten._assert_tensor_metadata.default:  # of exported programs
            assert args[0].device == device
            return None
        kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if isinstance(made, GpuTensor) or not isinstance(made, torch.Tensor):
            return made
        return moved(made, torch.device(device), None)

    @staticmethod
    def _to(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if func is torch.Tensor.cpu:
            return moved(tensor, torch.device("cpu"), None)
        if func is torch.Tensor.cuda:
            args = (torch.device("cuda", *args[:1]), *args[1:])
        every = [*args, kwargs.get("device"), kwargs.get("dtype")]
        devices = [torch.device(a) for a in every if isinstance(a, str | torch.device)]
        devices += [a.device for a in every if isinstance(a, torch.Tensor)]
        dtypes = [a for a in every if isinstance(a, torch.dtype)]
        if not isinstance(tensor, GpuTensor) and not any(map(_is_gpu, devices)):
            return func(tensor, *args, **kwargs)
        return moved(tensor, devices[0] if devices else tensor.device, dtypes[0] if dtypes else None)


class CurrentStream:
    """torch's current stream, which is the driver's stream 0 unless the user chooses another. So is every
    other one here: what orders them is for tests/cuda/fake_streams.py."""

    cuda_stream = 0

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def wait_stream(self, stream: CurrentStream) -> None:
        pass


def _brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``modules.gpu.brought`` in a backward pass, in which no modes of torch are in force."""
    with FakeCuda():
        return opening.brought(tensor, device)


_ADDRESSES = {"lookup_pooled": 2, "lookup_rows": 1, "weight_grads": 2, "update_pooled": 2, "update_rows": 1}
"""Methods of rows that take addresses of tensors, and how many arguments are before these."""


@contextmanager
def _addresses_of_gpu_tensors() -> Iterator[None]:
    """Let kernels get no address but of a ``GpuTensor``: the fake driver knows no memory of torch."""

    def checked(plain: Any, before: int) -> Any:
        def call(self: CudaRows, *given: Any, **more: Any) -> Any:
            there = [one - _OF_GPU if isinstance(one, int) and one > 4096 else one for one in given[before:]]
            with _keeping:
                known = [(one.data_ptr(), one.nbytes()) for one in _kept.values()]
            for address in (one for one in there if isinstance(one, int) and not 0 <= one <= 4096):
                assert any(begin <= address <= begin + size for begin, size in known), "memory of the host"
            return plain(self, *given[:before], *there, **more)

        return call

    with ExitStack() as stack:
        for name, before in _ADDRESSES.items():
            patched = checked(getattr(CudaRows, name), before)
            stack.enter_context(mock.patch.object(CudaRows, name, patched))
        yield


@contextmanager
def copies_by_another_thread() -> Iterator[None]:
    """Let another thread copy from the GPU whenever one has asked for an address, and has not launched a
    kernel with it yet: the worst time for the worker of a prefetch to copy ids."""
    plain = GpuTensor.data_ptr

    def data_ptr(tensor: GpuTensor) -> int:
        address = plain(tensor)
        worker = threading.Thread(target=finish)
        worker.start()
        worker.join()
        return address

    with mock.patch.object(GpuTensor, "data_ptr", data_ptr):
        yield


@contextmanager
def fake_torch(
    order: str = "eager", seed: int = 0, devices: int = 1, *, leaks: bool = False
) -> Iterator[list[FakeDevice]]:
    """torch for CUDA with so many GPUs, for tests of modules; yields the devices that are opened.

    Nothing may be wrong at the end, and nothing left, unless ``leaks``: an exception may come between the
    making of something and its name.
    """
    gpu = fake_gpu()
    gpu.begin(order, seed, 1 + seed % len(Stream))
    gpu.set_driver(devices=devices)
    gpu.set_pageable()  # tensors are the process's memory
    opened: list[FakeDevice] = []

    def opens(*options: Any) -> FakeDevice:
        opened.append(FakeDevice(*options))
        return opened[-1]

    with (
        loaded_parts() as loaded,
        checked_views(),
        _addresses_of_gpu_tensors(),
        mock.patch.object(gradient_hooks, "brought", _brought),
        mock.patch.object(rows, "STAGING_BYTES", 256),
        mock.patch.object(opening, "CudaDevice", opens),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "current_stream", return_value=CurrentStream()),
        mock.patch.object(torch.cuda, "Stream", return_value=CurrentStream()),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        FakeCuda(),
    ):
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter becomes a GpuTensor
        try:
            yield opened
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
            for device in opened:
                device.close()
            finish()
            alive, wrong = gpu.alive, gpu.wrong
            if gpu.failed:
                alive = 0, 0  # nothing can be given back any more
            if alive != (0, 0) or gpu.failed:
                gpu.forget()
    assert wrong == []
    prepared = set().union(*(device.prepared for device in opened))
    if prepared - {rows.ANY_LAYOUT}:  # else no table was opened, only rows
        assert loaded <= prepared, "these are compiled in the middle of a training, and not by make gpu-pack"
    assert leaks or alive == (0, 0)
    assert devices > 1 or gpu.counts["whole_waits"] == 0  # of all devices together, here
