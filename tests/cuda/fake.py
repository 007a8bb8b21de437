"""The fake driver of csrc/cuda/tests."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p

import numpy as np

from tests.cuda.compiled import shared_library

ORDERS = {"eager": 0, "lazy": 1, "random": 2, "starve": 3}
"""When operations run: at once, when the host waits for them, now or later, at once but for one stream."""


_COUNTS = ("launches", "copies", "host_accesses", "whole_waits", "prefers_host", "accessed_by")


class FakeGpu:
    """The library. Its state is the process's, so one device may be open at a time."""

    def __init__(self) -> None:
        self.path = str(shared_library("fake_driver"))
        self._library = ctypes.CDLL(self.path)
        self._library.fake_wrong.restype = c_char_p
        self._library.fake_waits.restype = c_int64
        self._library.fake_set_memory.argtypes = [c_size_t]
        self._library.fake_touch.argtypes = [c_void_p, c_size_t, c_int]
        self._library.fake_run.argtypes = [c_void_p]
        self._library.fake_set_capturing.argtypes = [c_void_p, c_int]
        self._library.cuMemHostRegister_v2.argtypes = [c_void_p, c_size_t, c_uint]
        self._library.cuMemHostUnregister.argtypes = [c_void_p]

    def begin(self, order: str = "eager", seed: int = 0, starved: int = 1) -> None:
        """Forget what was found and set up before."""
        self._library.fake_begin(ORDERS[order], c_uint(seed), starved)

    def set_driver(self, version: int = 13000, devices: int = 1, architecture: int = 90) -> None:
        self._library.fake_set_driver(version, devices, architecture)

    def set_memory(self, size: int) -> None:
        self._library.fake_set_memory(size)

    def set_shares_managed(self, shares: bool) -> None:
        """Say whether the host may use managed memory while kernels run."""
        self._library.fake_set_shares_managed(shares)

    def set_host_pointers(self, same: bool) -> None:
        """Say whether kernels reach registered memory at the host's addresses."""
        self._library.fake_set_host_pointers(same)

    def set_pageable(self) -> None:
        """Let kernels access all of the process's memory, without checks outside of the driver's."""
        self._library.fake_set_pageable()

    def set_capturing(self, stream: int, capturing: bool) -> None:
        self._library.fake_set_capturing(stream, capturing)

    def fail(self, function: str, code: int, after: int = 0) -> None:
        """Let the call of a function after ``after`` others return an error."""
        self._library.fake_fail(function.encode(), after, code)

    def fail_kernel(self, name: str) -> None:
        self._library.fake_fail_kernel(name.encode())

    def run(self, stream: int) -> None:
        """Run all of a stream, for whom nothing is ordered by it: no wait of the host."""
        self._library.fake_run(stream)

    def touch(self, address: int, size: int, write: bool) -> None:
        """Tell that the host accesses memory."""
        self._library.fake_touch(address, size, write)

    def forget(self) -> None:
        """Free all that a failed test has left."""
        self._library.fake_forget()

    @property
    def failed(self) -> bool:
        """Whether no call succeeds any more; :meth:`begin` forgets everything then."""
        return bool(self._library.fake_failed())

    @property
    def wrong(self) -> list[str]:
        found: bytes = self._library.fake_wrong()
        return found.decode().splitlines()

    @property
    def waits(self) -> int:
        """How often this thread has waited."""
        count: int = self._library.fake_waits()
        return count

    @property
    def counts(self) -> dict[str, int]:
        counts = (c_int64 * len(_COUNTS))()
        self._library.fake_counts(counts)
        return dict(zip(_COUNTS, counts, strict=True))

    @property
    def alive(self) -> tuple[int, int]:
        """Bytes of GPU memory that are allocated, and how many other objects."""
        alive = (c_int64 * 2)()
        self._library.fake_alive(alive)
        return alive[0], alive[1]

    def register(self, array: np.ndarray) -> None:
        assert self._library.cuMemHostRegister_v2(array.ctypes.data, array.nbytes, 0) == 0

    def unregister(self, array: np.ndarray) -> None:
        assert self._library.cuMemHostUnregister(array.ctypes.data) == 0


@functools.cache
def fake_gpu() -> FakeGpu:
    return FakeGpu()
