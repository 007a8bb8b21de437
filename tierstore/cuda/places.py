"""Where rows of a GPU are: the memory that they have, and how kernels find them by slot."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Protocol

from tierstore.cuda.args import MovedRows, RowsArgs


class Memory(Protocol):
    """Memory of rows; memory.Arena is the usual one."""

    @property
    def base(self) -> int: ...

    @property
    def mapped(self) -> int: ...

    def commit(self, size: int) -> None: ...

    def ensure(self, end: int) -> None: ...

    def discard(self, begin: int, marks: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Tail:
    """Where an arena that cuts its rows has what is behind their weights. ``head_bytes``: of the weights."""

    address: int
    head_bytes: int


@dataclass(frozen=True)
class Places:
    """Where rows of ``row_bytes`` bytes are: from the address ``base`` on, except the ``tail`` of each."""

    base: int
    row_bytes: int
    tail: Tail | None = None

    def of_kernels(self, state: int) -> Structure:
        """Return the argument of kernels that compute; ``state``: the byte of a row at which it begins."""
        return RowsArgs(*self._parts(state))

    def of_moves(self, head_bytes: int, slots: int | None) -> Structure:
        """Return the argument of moves; ``slots``: the address of the rows' slots, None: 0, 1 ..."""
        return MovedRows(*self._parts(head_bytes), slots)

    def _parts(self, cut: int) -> tuple[int, int, int, int]:
        """Return the address of each of a row's two parts and the floats from one row to the next."""
        floats = self.row_bytes // 4
        if self.tail is None:
            return self.base, floats, self.base + cut, floats
        head = self.tail.head_bytes // 4
        return self.base, head, self.tail.address, floats - head
