"""How many slots a memory tier may have, and how much memory this process."""

from __future__ import annotations

import resource

import psutil

MIN_SLOTS = 16
_MAX_OVERFLOW_ROWS = 1 << 26
_MAX_OVERFLOW_BYTES = 256 << 30  # address space is 2**47 bytes
MAX_SLOTS = (1 << 31) - _MAX_OVERFLOW_ROWS - 1
"""Slots are int32, and the overflow slots come behind the shares' slots."""


def memory_limit() -> int:
    """Return the bytes that this process may use: the machine's memory, or half of the limit of address
    space, which code and threads use, too."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    total = int(psutil.virtual_memory().total)
    return total if limit == resource.RLIM_INFINITY else min(total, limit // 2)


def overflow_rows(row_bytes: int) -> int:
    """Return the number of overflow slots to reserve address space for: as many rows as memory could hold."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    # Where address space is limited, reserve so little that dozens of row layouts find room.
    size = memory_limit() // 64 if limited else min(memory_limit(), _MAX_OVERFLOW_BYTES)
    return max(MIN_SLOTS, min(_MAX_OVERFLOW_ROWS, size // row_bytes))
