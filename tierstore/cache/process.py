"""Knows which process has the tables: a forked child has no memory tiers."""

from __future__ import annotations

import os

from tierstore.errors import ClosedError


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ``ClosedError`` in a forked child."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the tables belong to process {self._pid}, of which this one is a forked child (a worker of "
                "a DataLoader, perhaps); use tables in the process that opened them only"
            )
