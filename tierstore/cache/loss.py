"""Warns of rows that are lost when tables are dropped without a commit or a close."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence

from tierstore.cache.group import TierGroup
from tierstore.errors import ClosedError
from tierstore.store.protocol import RowStore

logger = logging.getLogger("tierstore")


def uncommitted_rows(groups: Sequence[TierGroup]) -> int:
    """Return how many rows changed since the last commit; a row that was written down and changed again
    counts twice."""
    return sum(group.uncommitted_rows() for group in groups)


def warns_of_loss(owner: object, path: str, groups: Sequence[TierGroup]) -> weakref.finalize:
    """Return a finalizer that warns when uncommitted rows of the store at ``path`` are dropped; "" stands for
    a temporary store.

    The warning runs when ``owner`` becomes garbage, or at the end of the process, unless ``detach()`` was
    called.
    """
    return weakref.finalize(owner, _warn, path, groups, os.getpid())


def has_ended(store: RowStore | None) -> bool:
    """Return whether ``store`` has closed itself, as some engines do when a change fails."""
    try:
        if store is not None:
            store.commits()
    except ClosedError:
        return True
    return False


def _warn(path: str, groups: Sequence[TierGroup], process: int) -> None:
    rows = uncommitted_rows(groups) if path and os.getpid() == process else 0
    if rows:
        logger.warning(
            "%s stays at its last commit: up to %d rows that changed since then are dropped, because nobody "
            "committed or closed the tables; call commit(), checkpoint.save() or close() before the end",
            path,
            rows,
        )
