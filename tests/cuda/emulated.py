"""Launches GPU kernels in the emulator of ``csrc/cuda/emulate.h``, which g++ compiles once per source."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import numpy as np

from tests.cuda.compiled import shared_library
from tests.kernels.kernel_oracle import Batch
from tierstore.cuda.args import WEIGHTS, BagsArgs, GatherArgs, RowsArgs
from tierstore.row_format import RowFormat

DIMS = (1, 3, 4, 17, 20, 32, 64, 100, 300)
DIMS_OF_16_BITS = (3, 8, 20, 32)
REDUCE_POSITIONS, LONG_POSITIONS = 256, 32


@functools.cache
def library() -> ctypes.CDLL:
    """Return the emulated kernels."""
    loaded = ctypes.CDLL(str(shared_library("emulated")))
    loaded.launch.restype = ctypes.c_char_p
    loaded.size_of.restype = c_int64
    return loaded


class Launch:
    """Arrays that the kernels of one test may access, and how its kernels are launched."""

    def __init__(
        self, seed: int, layout: tuple[int, int] = (-1, -1), optimizer: int = -1, weights: str = "fp32"
    ) -> None:
        self._layout, self._optimizer, self._dtype = layout, optimizer, weights
        self.seed, self._random = seed, np.random.default_rng(seed)
        self._arrays: list[np.ndarray] = []
        self._cut: tuple[np.ndarray, list[np.ndarray]] | None = None
        library().forget_arrays()

    def array(self, name: str, array: np.ndarray | None, *, writable: bool = False) -> int | None:
        """Let kernels access ``array``; return its address."""
        if array is None:
            return None
        assert array.flags.c_contiguous
        assert array.ctypes.data % 16 == 0
        self._arrays.append(array)  # it must outlive the launch
        library().add_array(c_void_p(array.ctypes.data), c_int64(array.nbytes), int(writable), name.encode())
        return array.ctypes.data

    def rows(self, rows: np.ndarray, dim: int, *, writable: bool = False) -> ctypes.Structure:
        """Rows of ``dim`` columns: each in one piece, or half of the time the weights apart from the rest."""
        whole = rows.view(np.uint8).reshape(len(rows), -1)
        cut, self._cut = RowFormat(self._dtype).weights_end(dim), None
        if cut % 16 or cut == whole.shape[1] or self._random.random() < 0.5:
            at, floats = self.array("rows", rows, writable=writable) or 0, whole.shape[1] // 4
            return RowsArgs(at, floats, at + cut, floats)
        parts = [aligned(whole[:, :cut]), aligned(whole[:, cut:])]
        if writable:
            self._cut = whole, parts
        weights, state = (
            self.array(name, part, writable=writable)
            for name, part in zip(("weights of rows", "state of rows"), parts, strict=True)
        )
        return RowsArgs(weights, cut // 4, state, whole.shape[1] // 4 - cut // 4)

    def gather(self, rows: np.ndarray, batch: Batch) -> ctypes.Structure:
        return GatherArgs(
            self.rows(rows, self._layout[0]),
            self.array("slots", batch.slots),
            self.array("inverse", batch.inverse),
        )

    def bags(self, batch: Batch) -> ctypes.Structure:
        return BagsArgs(
            self.array("offsets", batch.offsets),
            batch.num_bags,
            self.array("bag_start", batch.bag_start),
            len(batch.modes),
            self.array("out_offset", batch.out_offset),
            self.array("out_stride", batch.out_stride),
            self.array("poolings", batch.modes),
        )

    def run(self, kernel: str, args: ctypes.Structure, of_layout: bool = True) -> str:
        """Return what went wrong, or an empty text."""
        layout = self._layout if of_layout else (-1, -1)
        optimizer = self._optimizer if kernel.startswith("update") else -1
        weights = WEIGHTS[self._dtype] if of_layout else -1
        blocks, threads = self._random.choice([1, 2, 5]), self._random.choice([32, 64, 256])
        seed = int(self._random.integers(1 << 31))
        found: bytes = library().launch(
            *(kernel.encode(), *map(c_int, layout), c_int(optimizer), c_int(weights)),
            *(ctypes.byref(args), c_int(blocks), c_int(threads), ctypes.c_uint(seed)),
        )
        if self._cut is not None:
            self._cut[0][:] = np.concatenate(self._cut[1], axis=1)
        return found.decode()

    def __call__(self, kernel: str, args: ctypes.Structure, of_layout: bool = True) -> None:
        assert self.run(kernel, args, of_layout) == ""


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins at 16 bytes."""
    room = np.empty(array.nbytes + 16, np.uint8)
    begin = -room.ctypes.data % 16
    copied: np.ndarray = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[:] = array
    return copied


def vec_of(dim: int, *multiples: Sequence[int] | int) -> int:
    """Return the floats of a word: 4 where all that is read and written begins at 16 bytes."""
    return 4 if all(np.all(np.asarray(n) % 4 == 0) for n in (dim, *multiples)) else 1


def hot_rows(csr_start: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the unique rows with many positions, and the first piece of each, with their ends; behind the
    end of the rows are those with fewer positions, though more than most, and last is how many these are."""
    counts = np.diff(csr_start)
    hot = np.flatnonzero(counts > REDUCE_POSITIONS)
    pieces = -(-counts[hot] // REDUCE_POSITIONS)
    long = np.flatnonzero((counts > LONG_POSITIONS) & (counts <= REDUCE_POSITIONS))
    return (
        np.concatenate([hot, [len(counts)], long]).astype(np.int32),
        np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32),
        len(long),
    )
