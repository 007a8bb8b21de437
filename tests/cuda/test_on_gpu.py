"""What only a GPU can show: the code that NVRTC generates, its memory model, the driver. ``pytest -m cuda``.

The same work runs on the fake driver in the other files. None of this has ever run on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.random_work import RandomWork
from tests.cuda.test_modules_on_gpu import MODULES, model_trained, same, trained
from tests.cuda.test_uvm_on_gpu import KINDS, Hierarchy
from tierstore.cuda.device import CudaDevice
from tierstore.cuda.driver import Driver

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(60)]
DIMS = [1, 3, 4, 8, 20, 64, 100, 128, 256]
OPTIMIZERS = range(4)


class SharingDevice(CudaDevice):
    """A GPU whose tests' arrays are copied to its memory and back."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._shared: list[tuple[np.ndarray, torch.Tensor]] = []

    def share(self, array: np.ndarray) -> int:
        """Return the address of a copy, which :meth:`synchronize` copies back."""
        copy = torch.from_numpy(array.reshape(-1).view(np.uint8)).to("cuda:0")
        self._shared.append((array, copy))
        return copy.data_ptr()

    def synchronize(self) -> None:
        super().synchronize()
        for array, copy in self._shared:
            array.reshape(-1).view(np.uint8)[:] = copy.cpu().numpy()
        self._shared.clear()


@pytest.fixture
def device() -> Iterator[SharingDevice]:
    made = SharingDevice(0, lambda: torch.cuda.current_stream().cuda_stream)
    yield made
    made.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dim", DIMS)
def test_kernels_have_the_bits_of_the_host(device: SharingDevice, dim: int, kind: int) -> None:
    work = RandomWork(device, dim, kind, seed=dim)  # type: ignore[arg-type]
    work.do(60)
    del work


@pytest.mark.parametrize("seed", range(8))
def test_streams_wait_for_one_another_whatever_is_late(device: SharingDevice, seed: int) -> None:
    """Random streams are held up for up to a millisecond before random operations."""
    late = random.Random(seed)
    streams = [torch.cuda.ExternalStream(handle) for handle in device.streams.handles()]
    work = RandomWork(device, 64, 1, seed=seed)  # type: ignore[arg-type]
    for _ in range(12):
        for stream in late.sample(streams, 2):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(late.randrange(1, 2_000_000))
        work.do(8)
    del work


@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_between_hbm_and_uvm(device: SharingDevice, kind: str) -> None:
    work = Hierarchy(device, kind, seed=1)  # type: ignore[arg-type]
    work.do(200)
    del work


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_with_the_bits_of_the_host(name: str) -> None:
    same(trained(name, "cuda:0"), trained(name, None))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["rows with padding", "max", "collection", "sequences"])
def test_ids_may_be_on_the_gpu(name: str, prefetch: bool) -> None:
    found = trained(name, "cuda:0", ids_on="cuda:0", prefetch=prefetch)
    same(found, trained(name, None, prefetch=prefetch))


def test_a_model_trains() -> None:
    """Its dense layers are not the host's, bit for bit."""
    for ours, theirs in zip(model_trained("cuda:0"), model_trained(None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_driver_has_every_call() -> None:
    Driver()
