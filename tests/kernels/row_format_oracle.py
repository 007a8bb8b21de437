"""NumPy versions of the conversions of ``csrc/kernels/row_format.h``, written for plainness."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.kernels.kernel_oracle import philox_of
from tierstore.keys import split
from tierstore.row_format import RowFormat

F32 = np.float32
LARGEST = {"bf16": float.fromhex("0x1.fep127"), "fp16": 65504.0}


def hash_of(row: np.ndarray) -> int:
    words = row.view(np.uint32).tolist()
    words += [0] * (-len(words) % 16)
    mask = 0xFFFFFFFF
    lanes = [(i + 1) * 0xC2B2AE3D & mask for i in range(16)]
    for c, word in enumerate(words):
        mixed = (lanes[c % 16] ^ word) * 0x9E3779B1 & mask
        lanes[c % 16] = mixed ^ mixed >> 15
    half = 8
    while half:
        for i in range(half):
            mixed = ((lanes[i] ^ lanes[i + half] >> 7) * 0x85EBCA77 + lanes[i + half]) & mask
            lanes[i] = mixed ^ mixed >> 13
        half //= 2
    return lanes[0]


def dice(row: np.ndarray, id: int, seed: int, columns: int) -> np.ndarray:
    """The 16 random bits of each column."""
    blocks = np.arange(-(-columns // 8))
    fixed = (np.full(len(blocks), value) for value in (id & 0xFFFFFFFF, id >> 32))
    words = philox_of([*fixed, blocks, np.full(len(blocks), hash_of(row) | 1)], seed)
    return np.concatenate([words & 0xFFFF, words >> 16], axis=1).reshape(-1)[:columns]


def rounded(steps: float, random: int | None) -> int:
    """Round an exact number of steps; ``random``: 16 bits, None for the nearest."""
    below = math.floor(steps)
    part = steps - below
    if random is None:
        return below + (part > 0.5 or (part == 0.5 and below % 2 == 1))
    sixteenth = math.floor(part * 65536)
    sixteenth |= sixteenth < part * 65536
    return below + (sixteenth + random >= 65536)


def step_of(value: float, dtype: str) -> float:
    """The distance of neighbouring numbers of the format around ``value``."""
    digits, least = (8, -133) if dtype == "bf16" else (11, -24)
    return math.ldexp(1.0, max(math.frexp(value)[1] - digits, least))


def short(value: float, dtype: str, random: int | None) -> float:
    """``value`` as a number of the format."""
    if not math.isfinite(value) or value == 0:
        return value
    steps = abs(value) / step_of(value, dtype)
    if random is not None and dtype == "fp16" and abs(value) >= 2.0**-14:
        random = (random & 0x1FFF) << 3  # 13 bits are cut off, and as many are random
    size = min(rounded(steps, random) * step_of(value, dtype), LARGEST[dtype])
    return math.copysign(size, value)


def byte_step(row: np.ndarray) -> tuple[float, float]:
    """Step and offset of int8."""
    values = [float(x) for x in row]
    if not all(map(math.isfinite, values)) or not float(F32(max(values)) - F32(min(values))) < 2.0**127:
        return math.nan, math.nan
    if min(values) == max(values):
        return 0.0, min(values) + 0.0
    exponent = -126
    while True:
        first, last = math.floor(min(values) / 2.0**exponent), math.ceil(max(values) / 2.0**exponent)
        if last - first <= 255 and max(abs(first), abs(last)) <= 32767:
            return 2.0**exponent, first * 2.0**exponent
        exponent += 1


@dataclass(frozen=True)
class Oracle:
    """Rows that went through a format and back."""

    format: RowFormat
    dim: int
    seeds: list[int] | None

    def back(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        tables, ids = split(keys)
        result = np.zeros_like(rows)
        for i, row in enumerate(rows):
            random: list[int | None] = [None] * (len(row) + 8)
            if self.seeds is not None:
                random = dice(row, int(ids[i]), self.seeds[tables[i]], len(row) + 8).tolist()
            result[i, : self.dim] = self._weights(row[: self.dim], random)
            first = -(-self.dim // 8) * 8
            for c in range(self.dim, len(row)):
                value = float(row[c])
                if self.format.state == "bf16":
                    value = short(value, "bf16", random[first + c - self.dim])
                result[i, c] = value
        return result

    def _weights(self, row: np.ndarray, random: list[int | None]) -> list[float]:
        if self.format.weights == "fp32":
            return row.tolist()
        if self.format.weights != "int8":
            return [short(float(x), self.format.weights, random[c]) for c, x in enumerate(row)]
        step, offset = byte_step(row)
        if not step > 0:
            return [offset] * len(row)
        return [step * rounded(float(x) / step, random[c]) for c, x in enumerate(row)]
