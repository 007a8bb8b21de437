"""GPUs of torch as devices for rows: opened by their number, and computing in torch's current stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tierstore.cuda.device import CudaDevice
from tierstore.errors import GpuError


def _current_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


def what_was_given() -> Callable[[], None]:
    """Return what waits until the calling thread's current stream has done all that it was given so far."""
    if not torch.cuda.is_initialized():
        return lambda: None
    wait: Callable[[], None] = torch.cuda.current_stream().record_event().synchronize
    return wait


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
