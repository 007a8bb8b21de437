"""Threads that wait for the device, for engines whose own calls read one block after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 128  # so large that handing a chunk over costs little beside its reads
SMALLEST = 2 * _CHUNK
"""Batches below this are not worth the threads."""


class Readers:
    """A pool of ``threads``, started at the first large batch; 1 means the caller alone."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def map(self, read: Callable[[list[Item]], list[Result]], items: list[Item]) -> list[Result]:
        """Compute ``read(items)``, a list in the order of ``items``, in chunks by all threads."""
        if self._threads <= 1 or len(items) < SMALLEST:
            return read(items)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "tierstore-read")
        chunks = [items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK)]
        return list(chain.from_iterable(self._pool.map(read, chunks)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
