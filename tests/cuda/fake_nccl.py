"""NCCL between ranks with fake GPUs: gloo moves the bytes, and tensors must be on the rank's GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

from tests.cuda.compiled import shared_library
from tests.cuda.fake_torch import GpuTensor, fake_torch, finish

_groups: WeakSet[Any] = WeakSet()
"""Of this process. A job keeps its groups from one use of :func:`fake_nccl` to the next; torch owns them."""


class _Work:
    """A collective in a stream of the GPU. What it fills has no meaning before :meth:`wait`, which takes no
    timeout: with one, NCCL would let the host wait, and end all collectives when it is over."""

    def __init__(self, work: Any, out: torch.Tensor, arrived: torch.Tensor) -> None:
        self._work, self._out, self._arrived = work, out, arrived
        out.fill_(torch.nan)

    def wait(self) -> bool:
        self._work.wait()
        self._out.copy_(self._arrived)
        return True


class FakeNccl:
    """The groups that were made, and what they have done."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.exchanges = 0
        self.aborted = 0
        self._new_group, self._all_to_all = dist.new_group, dist.all_to_all_single
        self._backend = dist.ProcessGroup._get_backend

    def new_group(self, *args: Any, backend: str, **options: Any) -> Any:
        made = self._new_group(*args, backend="gloo", **options)
        if backend == "nccl":
            self.groups.append(made)
            _groups.add(made)
        return made

    def all_to_all_single(
        self, out: Any, given: Any, arriving: Any, leaving: Any, group: Any, async_op: bool
    ) -> Any:
        on_gpu = {isinstance(tensor, GpuTensor) for tensor in (out, given)}
        if on_gpu != {group in _groups}:
            raise RuntimeError("No backend type associated with device type of these tensors")
        if group not in _groups:
            return self._all_to_all(out, given, arriving, leaving, group=group, async_op=async_op)
        assert out.device == given.device
        finish()  # NCCL's stream waits for the current one
        self.exchanges += 1
        arrived = torch.empty_like(out.inner)
        work = self._all_to_all(arrived, given.inner.clone(), arriving, leaving, group=group, async_op=True)
        return _Work(work, out.inner, arrived)

    def backend(self, group: Any, device: torch.device) -> Any:
        """What torch has of a group for a kind of device."""
        if group in _groups and device.type == "cuda":
            return self
        return self._backend(group, device)

    def abort(self) -> None:
        self.aborted += 1


@contextmanager
def fake_nccl() -> Iterator[FakeNccl]:
    """torch.distributed with NCCL; inside of ``fake_torch``."""
    made = FakeNccl()
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "new_group", made.new_group),
        mock.patch.object(dist, "all_to_all_single", made.all_to_all_single),
        mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *of: made.backend(*of)),
    ):
        yield made


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what ranks load before they run: ranks that take much longer than usual are ended. For files
    of tests to import."""
    for name in ("fake_driver", "fake_nvrtc"):
        shared_library(name)


@contextmanager
def on_gpus(order: str = "eager", devices: int = 2, local_rank: int | None = None) -> Iterator[FakeNccl]:
    """This rank with the GPU of its number, as torchrun would start it."""
    local = dist.get_rank() if local_rank is None else local_rank
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(local)}),
        fake_torch(order, seed=3 + dist.get_rank(), devices=devices),
        fake_nccl() as nccl,
    ):
        yield nccl
