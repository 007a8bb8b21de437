"""How a GPU deduplicates the ids of a lookup: its kernels, in their order, and the room that they need.

The results are those of csrc/cache/batch.h and csr.h. Keys are sorted by as many bits as they have
(csrc/cuda/sort.cuh); the rest follows from their order (csrc/cuda/batch.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure
from dataclasses import dataclass
from itertools import accumulate

from tierstore.cuda.args import BatchArgs, SortArgs, SumsArgs

TILE = 512  # keys that a warp takes (csrc/cuda/sort.cuh)
_WARP = 32
_DIGIT_BITS = 7
_ALIGNMENT = 256
Step = tuple[str, Structure, int]
"""A kernel, its arguments, and the threads that it has work for."""


@dataclass(frozen=True)
class Room:
    """Memory of a GPU from the address ``base`` on, while it deduplicates ``n`` positions whose keys are
    below ``skipped``, of ``num_tables`` tables.

    The keys and their tables come first: they are copied there (csrc/cuda/args.h, BatchArgs).
    """

    base: int
    n: int
    skipped: int
    num_tables: int

    @property
    def arrays(self) -> list[tuple[int, int]]:
        """The address and the bytes of each array."""
        of_tables = 4 * self.num_tables
        sizes = [4 * self.n, of_tables, of_tables, 8 * self.n, 8 * self.n]
        sizes += [(4 << _DIGIT_BITS) * self._stride, 4 << _DIGIT_BITS, 4 * self.n]
        ends = accumulate(size + -size % _ALIGNMENT for size in sizes)
        return [(self.base + begin, size) for begin, size in zip((0, *ends), sizes, strict=False)]

    def _begin(self, number: int) -> int:
        return self.arrays[number][0]

    @property
    def _tiles(self) -> int:
        return -(-self.n // TILE)

    @property
    def _stride(self) -> int:
        return self._tiles + -self._tiles % 4

    @property
    def tables(self) -> tuple[int, int]:
        """Where the first key and the number of each table are."""
        return self._begin(1), self._begin(2)

    @property
    def copied(self) -> int:
        """Bytes that are copied there."""
        return self._begin(3) - self.base

    @property
    def size(self) -> int:
        """All bytes."""
        begin, size = self.arrays[-1]
        return begin + size - self.base

    @property
    def totals(self) -> int:
        """Where the kernels leave the number of unique keys, and that of positions that use a row."""
        return self._begin(6)

    @property
    def unique(self) -> int:
        """Where the kernels leave the unique keys, uint64: sorted keys are not there then."""
        return self._begin(3 + self._passes % 2)

    @property
    def _passes(self) -> int:
        return -(-self.skipped.bit_length() // _DIGIT_BITS)

    def steps(self, inverse: int, csr_positions: int, csr_start: int) -> Iterator[Step]:
        """Yield the kernels, whose results go to these addresses. The totals are there before the last two,
        the unique keys and ``csr_start`` before the last one."""
        sorted_keys, threads = self._begin(4 - self._passes % 2), _WARP * self._tiles
        counts, totals = self._begin(5), self.totals
        yield from self._sort()
        row = 4 * self._stride
        given = BatchArgs(
            *(self.base, sorted_keys, sorted_keys + 4 * self.n, self.n, self.skipped, self.num_tables),
            *(*self.tables, counts, counts + row, self._begin(7), counts + 2 * row, self._stride, totals),
            *(self.unique, inverse, csr_start, csr_positions),
        )
        for name in ("batch_runs", "batch_lengths", "batch_sums"):
            yield name, given, threads
        yield from self._sums(counts + 2 * row, 2)
        yield "batch_unique", given, threads
        yield "batch_positions", given, threads

    def _sort(self) -> Iterator[Step]:
        keys, positions, shift = self.base, 0, 0
        bits = -(-self.skipped.bit_length() // self._passes)
        for number in range(self._passes):
            to = self._begin(3 + number % 2)
            given = SortArgs(
                *(keys, positions, to, to + 4 * self.n, self._begin(5), self._stride, self.totals),
                *(self.n, shift, bits),
            )
            yield "sort_count", given, _WARP * self._tiles
            yield from self._sums(self._begin(5), 1 << bits)
            yield "sort_place", given, _WARP * self._tiles
            keys, positions, shift = to, to + 4 * self.n, shift + bits

    def _sums(self, rows: int, num_rows: int) -> Iterator[Step]:
        yield "sum_rows", SumsArgs(rows, num_rows, self._tiles, self._stride, self.totals), _WARP * num_rows
