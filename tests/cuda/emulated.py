"""Launches GPU kernels in the emulator of ``csrc/cuda/emulate.h``, which g++ compiles once per source."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

from tests.kernels.kernel_oracle import Batch

_ROOT = Path(__file__).parents[2]
_SOURCE = _ROOT / "csrc" / "cuda" / "tests" / "emulated.cc"
_FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
DIMS = (1, 3, 4, 17, 20, 64, 100, 300)
REDUCE_POSITIONS = 256


def _struct(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


RowsArgs = _struct("RowsArgs", *_pointers("base"), ("row_floats", c_int64))
MoveRowsArgs = _struct(
    "MoveRowsArgs",
    *_pointers("source"),
    ("from_floats", c_int64),
    *_pointers("from_rows", "target"),
    ("to_floats", c_int64),
    *_pointers("to_rows"),
    ("n", c_int64),
    ("words", c_int64),
)
GatherArgs = _struct("GatherArgs", ("rows", RowsArgs), *_pointers("slots", "inverse"))
BagsArgs = _struct(
    "BagsArgs",
    *_pointers("offsets"),
    ("num_bags", c_int64),
    *_pointers("bag_start"),
    ("num_features", c_int64),
    *_pointers("out_offset", "out_stride", "poolings"),
)
LookupPooledArgs = _struct(
    "LookupPooledArgs", ("gather", GatherArgs), ("bags", BagsArgs), *_pointers("weights", "out", "argmax")
)
LookupRowsArgs = _struct(
    "LookupRowsArgs", ("gather", GatherArgs), ("n", c_int64), *_pointers("out"), ("out_stride", c_int64)
)
WeightGradsArgs = _struct(
    "WeightGradsArgs", ("gather", GatherArgs), ("bags", BagsArgs), *_pointers("grad", "out")
)
BagShare = _struct(
    "BagShare", ("grad", c_int64), ("argmax", c_int64), ("scale", c_float), ("unused", c_int32)
)
BagSharesArgs = _struct(
    "BagSharesArgs", ("bags", BagsArgs), ("dim", c_int64), *_pointers("inverse", "shares", "bag_of")
)
GradsArgs = _struct(
    "GradsArgs",
    *_pointers("grad"),
    ("stride", c_int64),
    *_pointers("shares", "bag_of", "weights", "argmax"),
)
_STEP = ("lr", "eps", "l2", "keep", "beta1", "beta2", "rest1", "rest2", "adam_lr", "adam_inv_sqrt_v")
StepArgs = _struct("StepArgs", *[(name, c_float) for name in _STEP])
UpdateArgs = _struct(
    "UpdateArgs",
    ("rows", RowsArgs),
    *_pointers("slots"),
    ("num_slots", c_int64),
    *_pointers("csr_start", "csr_positions"),
    ("grads", GradsArgs),
    ("step", StepArgs),
    ("check_finite", c_int32),
    ("unused", c_int32),
    *_pointers("rejected", "squares", "means", "hot", "hot_piece"),
    ("num_hot", c_int64),
    *_pointers("partials"),
)
InitRowsArgs = _struct(
    "InitRowsArgs",
    ("rows", RowsArgs),
    *_pointers("slots", "keys"),
    ("n", c_int64),
    ("dim", c_int64),
    ("state_floats", c_int64),
    ("state_value", c_float),
    ("unused", c_int32),
    *_pointers("kinds", "first", "second", "seeds", "columns"),
)
STRUCTS = (
    *(MoveRowsArgs, LookupPooledArgs, LookupRowsArgs, WeightGradsArgs),
    *(BagSharesArgs, BagShare, UpdateArgs, InitRowsArgs),
)


@functools.cache
def library() -> ctypes.CDLL:
    """Compile the emulated kernels, unless these sources were compiled before."""
    sources = [
        *sorted((_ROOT / "csrc" / "cuda").glob("**/*.*")),
        *sorted((_ROOT / "csrc/kernels").glob("*.h")),
    ]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    target = _ROOT / "build" / "cuda" / f"emulated-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++").split()
        command = [*compiler, *_FLAGS, "-I", _ROOT / "csrc", _SOURCE, "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made.rename(target)
    loaded = ctypes.CDLL(str(target))
    loaded.launch.restype = ctypes.c_char_p
    loaded.size_of.restype = c_int64
    return loaded


class Launch:
    """Arrays that the kernels of one test may access, and how its kernels are launched."""

    def __init__(self, seed: int, layout: tuple[int, int] = (-1, -1), optimizer: int = -1) -> None:
        self._layout, self._optimizer = layout, optimizer
        self._random = np.random.default_rng(seed)
        self._arrays: list[np.ndarray] = []
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

    def rows(self, rows: np.ndarray, *, writable: bool = False) -> ctypes.Structure:
        return RowsArgs(self.array("rows", rows, writable=writable), rows.shape[1])

    def gather(self, rows: np.ndarray, batch: Batch) -> ctypes.Structure:
        return GatherArgs(
            self.rows(rows), self.array("slots", batch.slots), self.array("inverse", batch.inverse)
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
        blocks, threads = self._random.choice([1, 2, 5]), self._random.choice([32, 64, 256])
        seed = int(self._random.integers(1 << 31))
        return (
            library()
            .launch(
                *(kernel.encode(), *map(c_int, layout), c_int(optimizer)),
                *(ctypes.byref(args), c_int(blocks), c_int(threads), ctypes.c_uint(seed)),
            )
            .decode()
        )

    def __call__(self, kernel: str, args: ctypes.Structure, of_layout: bool = True) -> None:
        assert self.run(kernel, args, of_layout) == ""


def vec_of(dim: int, *multiples: Sequence[int] | int) -> int:
    """Return the floats of a word: 4 where all that is read and written begins at 16 bytes."""
    return 4 if all(np.all(np.asarray(n) % 4 == 0) for n in (dim, *multiples)) else 1


def hot_rows(csr_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the unique rows with many positions, and the first piece of each, with their ends."""
    counts = np.diff(csr_start)
    hot = np.flatnonzero(counts > REDUCE_POSITIONS)
    pieces = -(-counts[hot] // REDUCE_POSITIONS)
    return (
        np.append(hot, len(counts)).astype(np.int32),
        np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32),
    )
