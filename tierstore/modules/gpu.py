"""GPUs of torch as devices for rows: opened by their number, and computing in torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tierstore.cuda.device import CudaDevice
from tierstore.errors import GpuError


def _current_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


def current_streams(tensors: Iterable[Tensor]) -> list[torch.cuda.Stream]:
    """Return the calling thread's current streams of the GPUs of ``tensors``, and of torch's current GPU as
    the last; none where torch uses no GPU."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    others = {tensor.device.index for tensor in tensors if tensor.is_cuda} - {current}
    return [torch.cuda.current_stream(gpu) for gpu in (*sorted(others), current)]


@contextmanager
def on_streams(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """Let ``streams`` be the calling thread's current ones."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def made_here(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that lets a later current stream use ``tensors`` of one GPU, which the stream that is
    current now makes: the later stream waits for this one, and torch's allocator is told of the use."""
    there = [tensor for tensor in tensors if tensor.is_cuda]
    if not there:
        return lambda: None
    made = torch.cuda.current_stream(there[0].device)

    def follow() -> None:
        now = torch.cuda.current_stream(there[0].device)
        if now != made:
            now.wait_stream(made)
            for tensor in there:
                tensor.record_stream(now)

    return follow


def gpu_memory() -> int:
    """Return the bytes of torch's current GPU, which all ranks of a job are taken to have."""
    return int(torch.cuda.mem_get_info()[1])


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on ``device``, where what the current stream is given next finds it. The
    host does not wait for the copy to a GPU, which needs locked memory."""
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def open_cuda(index: int | None) -> CudaDevice:
    """Return GPU number ``index``, None: torch's current one, with kernels that compile for it.

    Raises ``GpuError``.
    """
    chosen = index
    if chosen is None:
        chosen = torch.cuda.current_device() if torch.cuda.is_available() else 0
    device = CudaDevice(chosen, lambda: _current_stream(chosen))
    try:
        if not torch.cuda.is_available():
            raise GpuError(
                f"there is a GPU, but this torch ({torch.__version__}) cannot use it, so lookups could not "
                "return tensors on it. Install torch for CUDA (https://pytorch.org/get-started/locally)"
            )
        device.prepare()
    except BaseException:
        device.close()
        raise
    return device
