"""How data goes over the wire, and the memory that it goes through."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.cache.tiers.buffers import Buffer
from tierstore.errors import ConfigError

CPU = torch.device("cpu")
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CommsConfig:
    """How sharded collections exchange rows. The default is exact.

    forward_precision, backward_precision: "fp32", "bf16" or "fp16"; vectors and their gradients are rounded
        to it, also where they stay on their rank, so that the result does not depend on who holds a row.
        Gradients beyond 65504 become infinite in fp16, and so do their rows, unless the tiers have
        ``check_gradients``, which leaves these rows alone and raises GradientError.
    dedup: every rank asks for an id once per batch and feature, gets rows instead of pooled vectors, pools
        them itself and adds up their gradients before it sends them: fewer bytes where ids repeat a lot.
    """

    forward_precision: str = "fp32"
    backward_precision: str = "fp32"
    dedup: bool = False

    def __post_init__(self) -> None:
        for name in ("forward_precision", "backward_precision"):
            if getattr(self, name) not in _PRECISIONS:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(_PRECISIONS)}")

    @property
    def forward_dtype(self) -> torch.dtype:
        """The dtype of vectors on the wire."""
        return _PRECISIONS[self.forward_precision]

    @property
    def backward_dtype(self) -> torch.dtype:
        """The dtype of gradients on the wire."""
        return _PRECISIONS[self.backward_precision]


class WireMemory:
    """Buffers for exchanges, kept from step to step: new pages of many MiB would cost more than the work on
    them. The next :meth:`take` of a name overwrites the buffer of this name.

    On a GPU torch's allocator keeps memory, and knows which streams use it, so every buffer is a new tensor.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._on_gpu = None if device == CPU else torch.empty(0, dtype=torch.float32, device=device)
        self._held: dict[tuple[str, torch.dtype], Buffer] = {}

    def take(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer of ``count`` elements, not initialised."""
        if self._on_gpu is not None:
            return self._on_gpu.new_empty(count, dtype=dtype)
        held = self._held.get((name, dtype))
        if held is None:
            self._held[name, dtype] = held = Buffer(dtype.itemsize)
        return torch.from_numpy(held.take(count)).view(dtype).view(-1)


class OutputMemory:
    """Memory of outputs, used again once the tensor, its views and graphs that need it are gone: the pages of
    new memory would be faulted in and cleared at every step. On a GPU every output is a new tensor."""

    _KEPT = 2

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._held: list[tuple[Buffer, weakref.ref[NDArray[np.float32]]]] = []
        """Memory, and an object that lives as long as the tensor's storage."""

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return a float32 tensor, not initialised."""
        if self._device != CPU:
            return torch.empty(shape, dtype=torch.float32, device=self._device)
        free = [at for at, (_, user) in enumerate(self._held) if user() is None]
        memory = self._held.pop(free[0])[0] if free else Buffer(np.dtype(np.float32).itemsize)
        used = memory.take(math.prod(shape)).view(np.float32).reshape(-1)
        self._held = [*self._held[1 - self._KEPT :], (memory, weakref.ref(used))]
        return torch.from_numpy(used).view(shape)
