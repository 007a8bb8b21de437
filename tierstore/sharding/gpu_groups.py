"""The NCCL groups by which the GPUs of ranks exchange tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_GPU = torch.device("cuda")


class GpuGroups:
    """The NCCL groups of some ranks, each made when all ranks first ask for it.

    Vectors have a group of their own. In one group with dense gradients, exchanges and reductions would have
    to be in the same order on all ranks. ``new``: makes a group of the ranks with a backend.
    """

    def __init__(self, new: Callable[[str], Any]) -> None:
        self._new = new
        self._made: dict[str, Any] = {}

    def of(self, purpose: str) -> Any:
        """Return the group for "vectors" or "dense". All ranks ask for a new one."""
        if purpose not in self._made:
            self._made[purpose] = self._new("nccl")
        return self._made[purpose]

    def abort(self) -> None:
        """End what the GPU does for these groups, so that nobody waits there for a rank that is gone."""
        for group in self._made.values():
            with suppress(Exception):  # what is left of a job that has failed
                group._get_backend(_GPU).abort()
