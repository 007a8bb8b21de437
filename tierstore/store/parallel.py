"""Threads that wait for the device while others work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 128  # so large that handing a chunk over costs little beside its reads
SMALLEST = 2 * _CHUNK
"""Batches below this are not worth the threads."""


_AHEAD = 8  # items; the native store makes four at a time


def ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield ``items``, of which another thread makes the next while the caller works on one."""
    pool = ThreadPoolExecutor(1, "tierstore-ahead")
    try:
        coming = deque(pool.submit(next, items, None) for _ in range(_AHEAD))
        while (item := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


class Readers:
    """A pool of ``threads`` for engines whose calls read one block after the other, started at the first
    large batch; 1 means the caller alone."""

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
