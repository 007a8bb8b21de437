"""What goes over the wire, and the memory that it goes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.errors import ConfigError

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CommsConfig:
    """How sharded collections talk. The default is exact.

    forward_precision, backward_precision: "fp32", "bf16" or "fp16"; vectors and their gradients are rounded
        to it, also those that stay on their rank, so that the result does not depend on who holds a row.
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
        return _PRECISIONS[self.forward_precision]

    @property
    def backward_dtype(self) -> torch.dtype:
        return _PRECISIONS[self.backward_precision]


class WireMemory:
    """Memory for what is on its way, kept from step to step: fresh pages of many MiB would cost more than
    what is done with them. What was taken under a name is overwritten by who takes that name next."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for ``count`` elements, not initialised."""
        held = self._held.get((name, dtype))
        if held is None or held.numel() < count:
            self._held[name, dtype] = held = torch.empty(count + count // 8, dtype=dtype)
        return held[:count]
