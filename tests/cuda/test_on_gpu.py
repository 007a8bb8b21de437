"""What only a GPU can show: the code that NVRTC generates, its memory model, the driver. ``pytest -m cuda``.

The same work runs on the fake driver in the other files; test_training_on_gpu.py has whole trainings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cuda.check_lookups import check_made, criteo_like, random_segments
from tests.cuda.random_work import RandomWork, kernels_are_kept
from tests.cuda.test_uvm_on_gpu import KINDS, Hierarchy
from tests.kernels.kernel_oracle import KINDS as KINDS_OF_OPTIMIZERS
from tierstore.cuda.cubins import CubinCache
from tierstore.cuda.device import CudaDevice, Libraries
from tierstore.cuda.driver import Driver
from tierstore.cuda.lookups import MAKES_FROM, GpuBatch

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(60)]
# Words of one float and of four; every number of threads that share a row; weights of 16 bits.
LAYOUTS = [
    *((dim, kind, "fp32") for dim in (1, 3, 4, 8, 20, 64, 100, 128, 256) for kind in (0, 1, 3)),
    *((dim, kind, "fp32") for dim in (3, 64) for kind in KINDS_OF_OPTIMIZERS if kind not in (0, 1, 3)),
    *(
        (dim, kind, weights)
        for dim in (3, 20, 64, 128)
        for kind in (0, 1, 3, 9)
        for weights in ("bf16", "fp16")
    ),
]

LATE = 64, "fp32", 1  # rows on which streams work that are held up


class SharingDevice(CudaDevice):
    """A GPU whose tests' arrays are copied to its memory and back."""

    def __init__(self, libraries: Libraries | None = None) -> None:
        super().__init__(0, lambda: torch.cuda.current_stream().cuda_stream, libraries)
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
    made = SharingDevice()
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_kernels_have_the_bits_of_the_host(device: SharingDevice, layout: tuple[int, int, str]) -> None:
    dim, kind, weights = layout
    work = RandomWork(device, dim, kind, dim, weights)  # type: ignore[arg-type]
    work.do(60)
    del work


@pytest.mark.parametrize("seed", range(8))
def test_streams_wait_for_one_another_whatever_is_late(device: SharingDevice, seed: int) -> None:
    """Random streams are held up for up to a millisecond before random operations."""
    late = Late(device, seed)
    dim, weights, kind = LATE
    work = RandomWork(device, dim, kind, seed, weights)  # type: ignore[arg-type]
    for _ in range(12):
        late.hold_up()
        work.do(8)
    del work


class Late:
    """Holds up random streams of a device, torch's current one among them."""

    def __init__(self, device: SharingDevice, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[torch.cuda.Stream] = [
            torch.cuda.ExternalStream(handle) for handle in device.streams.handles()
        ]
        self._streams.append(torch.cuda.current_stream())

    def hold_up(self) -> None:
        for stream in self._random.sample(self._streams, 2):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self._random.randrange(1, 2_000_000))


@pytest.mark.parametrize("batch_size", [7_000, 65_536])
def test_lookups_that_it_makes_are_those_of_the_host(device: SharingDevice, batch_size: int) -> None:
    rng, late = np.random.default_rng(batch_size), Late(device, batch_size)
    for turn in range(4):
        segments = criteo_like(rng, batch_size) if turn % 2 else random_segments(rng, 1 << 17)
        late.hold_up()
        batch = check_made(device, segments)
        assert isinstance(batch, GpuBatch) or sum(len(ids) for ids, *_ in segments) < MAKES_FROM
    bad = [*criteo_like(rng, batch_size), (np.array([3, 5, 9]), 40, 5, -1)]
    check_made(device, bad)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_between_hbm_and_uvm(device: SharingDevice, kind: str) -> None:
    work = Hierarchy(device, kind, seed=1)  # type: ignore[arg-type]
    work.do(200)
    del work


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_between_hbm_and_uvm_whatever_is_late(device: SharingDevice, kind: str, seed: int) -> None:
    late, work = Late(device, seed), Hierarchy(device, kind, seed)  # type: ignore[arg-type]
    for _ in range(10):
        late.hold_up()
        work.do(10)
    del work


def test_kernels_are_compiled_once_and_kept(tmp_path: Path) -> None:
    def opened(nvrtc: Sequence[str] | None) -> SharingDevice:
        return SharingDevice(Libraries(nvrtc=nvrtc, cache=CubinCache(tmp_path)))

    kernels_are_kept(opened, None, tmp_path)


def test_the_driver_has_every_call() -> None:
    Driver()
