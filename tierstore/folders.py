"""The folders that a user names for a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tierstore.errors import ConfigError

MAX_PATHS = 16
"""Devices over which a store is spread at most."""


def paths_of(path: Any) -> tuple[str, ...]:
    """Return the paths of ``path``: one, a list, or none for ``None``. Raises ``ConfigError`` for anything
    else."""
    if path is None:
        return ()
    several = isinstance(path, Sequence) and not isinstance(path, str | bytes)
    if several and not 1 <= len(path) <= MAX_PATHS:
        raise ConfigError(f"path is a list of {len(path)} paths; give 1 to {MAX_PATHS}, one for each device")
    paths = path if several else [path]
    for one in paths:
        if not isinstance(one, str | os.PathLike):
            raise ConfigError(f"path is {path!r}; it must be a folder's path, a list of them, or None")
        if "\0" in os.fsdecode(one):
            raise ConfigError(f"path is {path!r}, which has a zero character; no file can have that name")
        if not _is_utf8(os.fsdecode(one)):
            raise ConfigError(f"path is {path!r}, which is not UTF-8; give another path, or a UTF-8 locale")
        if not os.fspath(one):
            raise ConfigError("path is empty; leave it out (None) for a temporary folder")
    return tuple(os.fspath(one) for one in paths)


def _is_utf8(name: str) -> bool:
    """Tell whether a path can be given to engines, which are native code, and come back in their errors."""
    try:
        name.encode()
    except UnicodeEncodeError:  # Python has surrogates for bytes that the locale cannot read
        return False
    return True
