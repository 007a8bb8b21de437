"""What an engine writes beside the rows of a commit, as it is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypedDict, cast

from tierstore.errors import StoreMismatchError


class CommitMeta(TypedDict, total=False):
    """The entries that are read back; older commits lack some, or have ``checkpoints`` for ``checkpoint``."""

    updates: dict[str, int]
    checkpoint: str
    checkpoints: str
    versions: dict[str, str]
    extra: dict[str, object]


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "updates": lambda value: (
        isinstance(value, dict) and all(isinstance(n, int) and 0 <= n < 1 << 63 for n in value.values())
    ),
    "checkpoint": lambda value: isinstance(value, str),
    "versions": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
}


def parse_meta(meta: bytes, where: str) -> CommitMeta:
    """Return the entries of a commit's meta; none of an empty one.

    Raises ``StoreMismatchError`` for what no module has written: other programs commit any bytes, and an
    import takes them over. ``where``: the store's folders, for the message.
    """
    if not meta:
        return {}
    try:
        found = json.loads(meta)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        fits(found[name]) for name, fits in _CHECKS.items() if name in found
    ):
        raise StoreMismatchError(
            f"the commit in {where} has meta that no module has written ({meta[:40]!r}); read its rows with "
            "tierstore.store.open_store, take an older commit (tierstore export --at), or give another path"
        )
    return cast(CommitMeta, found)
