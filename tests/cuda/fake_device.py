"""A ``CudaDevice`` on the fake driver."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.cuda.compiled import shared_library
from tests.cuda.fake import fake_gpu
from tierstore._core import HostRows
from tierstore.cache.device import ComputedRows
from tierstore.cuda import rows
from tierstore.cuda.compute import parts_of
from tierstore.cuda.cubins import CubinCache, Part
from tierstore.cuda.device import CudaDevice, Libraries
from tierstore.cuda.memory import Block
from tierstore.cuda.rows import ANY_LAYOUT
from tierstore.cuda.streams import Stream
from tierstore.cuda.uvm import UvmRows


@functools.cache
def _cache() -> CubinCache:
    folder = tempfile.TemporaryDirectory()
    cache = CubinCache(Path(folder.name))
    cache.keeps = folder  # type: ignore[attr-defined]  # until the process ends
    return cache


class FakeDevice(CudaDevice):
    """A ``CudaDevice`` on the fake driver, whose accesses to staging memory are checked, too."""

    def __init__(self, *options: Any, libraries: Libraries | None = None, **more: Any) -> None:
        usual = Libraries(fake_gpu().path, [str(shared_library("fake_nvrtc"))], _cache())
        super().__init__(*options, libraries=libraries or usual, **more)
        self._shared: list[np.ndarray] = []
        self.prepared: set[Part] = set()

    def prepare(self, rows: Collection[ComputedRows] = (), updated: Collection[ComputedRows] = ()) -> None:
        self.prepared |= {ANY_LAYOUT, *parts_of(rows, updated)}
        super().prepare(rows, updated)

    def share(self, array: np.ndarray) -> int:
        """Let kernels access the array until the device is closed; return its address."""
        if array.nbytes and not any(array is shared for shared in self._shared):
            with self.streams.context:
                fake_gpu().register(array)
            self._shared.append(array)
        return array.ctypes.data

    def stream(self, name: Stream) -> int:
        return self.streams.handle(name)

    def abandon(self) -> None:
        """Leave a device in which something is wrong, whose operations would go on with wrong values."""
        self.streams._closed = True
        fake_gpu().forget()
        fake_gpu().begin()

    def close(self) -> None:
        """Close the device; arrays that were shared have left it before their memory is used again."""
        if self.streams.is_usable:
            self.synchronize()
            with self.streams.context:
                for array in self._shared:
                    fake_gpu().unregister(array)
            self._shared.clear()
        super().close()


@contextmanager
def checked_views() -> Iterator[None]:
    """Tell the fake driver of every access of the host to staging memory, and to rows of ``uvm``."""
    plain = Block.view

    def view(self: Block, begin: int, size: int, *, write: bool) -> np.ndarray:
        if size:
            fake_gpu().touch(self.address + begin, size, write)
        return plain(self, begin, size, write=write)

    def on_host(self: UvmRows, slots: np.ndarray, *, write: bool) -> HostRows:
        rows = plain_rows(self, slots, write=write)
        for slot in slots.tolist():
            for at in range(slot * self.row_bytes, (slot + 1) * self.row_bytes, 16):
                fake_gpu().touch(self._memory.base + at, 16, write)  # a row may lie in two pieces
        return rows

    plain_rows = UvmRows.on_host
    with mock.patch.object(Block, "view", view), mock.patch.object(UvmRows, "on_host", on_host):
        yield


@contextmanager
def fake_device(order: str = "eager", seed: int = 0, **options: object) -> Iterator[FakeDevice]:
    """A device for one test, in which nothing may be wrong at the end and nothing is left."""
    gpu = fake_gpu()
    gpu.begin(order, seed, 1 + seed % len(Stream))
    with checked_views(), mock.patch.object(rows, "STAGING_BYTES", 256):
        device = FakeDevice(**options)
        try:
            yield device
            device.synchronize()
        finally:
            device.close()
            alive, wrong = gpu.alive, gpu.wrong
            if alive != (0, 0):
                gpu.forget()
    assert wrong == []
    assert gpu.counts["whole_waits"] == 0
    assert alive == (0, 0)
