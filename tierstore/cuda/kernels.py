"""The kernels of a GPU: compiled and loaded when they are first launched."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_void_p
from functools import partial

from tierstore.cuda.cubins import Cubins, Part
from tierstore.cuda.driver import REFUSED_IMAGES, CallError
from tierstore.cuda.streams import Operation, Stream, Streams

THREADS = 256  # of a block: what csrc/cuda/kernels.cu is compiled for
_WARP = 32
_BLOCKS_OF_MOVES = 16
"""A move leaves the other multiprocessors to the kernels that compute. Fewer blocks down than up, so that
writes crowd out fewer reads, are slower: with 4, an H200 moved 32 GB/s both ways; an H100 46 with 16."""
_MOST_BLOCKS = (1 << 31) - 1


def lanes_of(dim: int, vec: int) -> int:
    """Return how many threads share a row of ``dim`` columns in words of ``vec`` (csrc/cuda/device.cuh)."""
    lanes = 16 // vec
    while lanes < dim // vec and lanes < _WARP:
        lanes *= 2
    return lanes


class Kernels:
    """The kernels on one GPU."""

    def __init__(self, streams: Streams, cubins: Cubins) -> None:
        self._streams, self._cubins = streams, cubins
        self._lock = threading.Lock()
        self._modules: dict[Part, int] = {}
        self._functions: dict[tuple[Part, str], int] = {}

    def load(self, part: Part, name: str) -> int:
        """Return the handle of a kernel, which is compiled now if it was never used on this machine.

        Raises ``GpuError``.
        """
        with self._lock:
            function = self._functions.get((part, name))
            if function is None:
                with self._streams.calls():
                    module = self._module(part)
                    function = self._streams.driver.handle("cuModuleGetFunction", module, name.encode())
                self._functions[part, name] = function
            return function

    def prepare(self, part: Part) -> None:
        """Load a part of the kernels, as :meth:`load` does when one of them is used first."""
        with self._lock, self._streams.calls():
            self._module(part)

    def _module(self, part: Part) -> int:
        if part not in self._modules:
            driver = self._streams.driver
            try:
                module = driver.handle("cuModuleLoadData", self._cubins.get(part))
            except CallError as refused:
                if refused.code not in REFUSED_IMAGES:
                    raise
                module = driver.handle("cuModuleLoadData", self._cubins.get(part, again=True))
            self._modules[part] = module
        return self._modules[part]

    def launch(
        self, operation: Operation, part: Part, name: str, args: ctypes.Structure, threads: int
    ) -> None:
        """Run a kernel on ``threads`` threads, or on fewer that take turns. :meth:`load` it before."""
        for call in self.launching(operation, part, name, args, threads):
            call()

    def launching(
        self, operation: Operation, part: Part, name: str, args: ctypes.Structure, threads: int
    ) -> list[partial[int]]:
        """Return the native call that :meth:`launch` makes, or none for no threads."""
        if threads <= 0:
            return []
        most = _BLOCKS_OF_MOVES if operation.stream in (Stream.UP, Stream.DOWN) else _MOST_BLOCKS
        blocks = min(-(-threads // THREADS), most)
        pointers = (c_void_p * 1)(ctypes.addressof(args))
        pointers.kept = args  # type: ignore[attr-defined]  # which an array of addresses does not keep
        operation.kernels.append(name)
        given = self._functions[part, name], blocks, 1, 1, THREADS, 1, 1, 0, operation.handle, pointers, None
        return [self._streams.driver.ready("cuLaunchKernel", *given, what=f" of {name}")]

    def close(self) -> None:
        """Unload all kernels."""
        self._functions.clear()
        with self._streams.calls():
            while self._modules:
                self._streams.driver.call("cuModuleUnload", self._modules.popitem()[1])
