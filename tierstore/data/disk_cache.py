"""Arrays that were expensive to parse, kept in the user's cache directory. Works without one."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


def cache_directory() -> Path | None:
    """Return ``$XDG_CACHE_HOME/tierstore``, by default ``~/.cache/tierstore``; None without a home."""
    # the XDG specification: a relative path is to be ignored
    for root in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(root):
            return Path(root) / "tierstore"
    return None


def cached_arrays(key: str, sources: Sequence[Path], build: Callable[[], Arrays]) -> Arrays:
    """Return ``build()``, or its last result under ``key`` if ``sources`` are unchanged since.

    A cache that cannot be read or written is only logged; concurrent writers replace the file whole.
    """
    directory = cache_directory()
    if directory is None:
        return build()
    states = "".join(f"{f.resolve()}:{f.stat().st_size}:{f.stat().st_mtime_ns};" for f in sources)
    file = directory / f"{key}-{zlib.crc32(states.encode()):08x}.npz"
    arrays = _read(file)
    if arrays is None:
        arrays = build()
        try:
            _write(file, arrays)
        except OSError as error:
            log.info("the parsed dataset is not cached: %s", error)
    return arrays


def _read(file: Path) -> Arrays | None:
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s cannot be read (%s); the dataset is parsed again", file, error)
        return None


def _write(file: Path, arrays: Arrays) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
