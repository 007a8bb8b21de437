"""Makes one error of what readers of damaged archives raise."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.errors import InputError, TierStoreError


@contextmanager
def named_damage(path: Path, what: str) -> Iterator[None]:
    """Raise ``InputError`` with "``path``: ``what``" where the block cannot read what a file holds.

    A system that refuses the file raises as before. zipfile, zlib, NumPy and Arrow have a dozen kinds of
    errors for bytes that they do not expect, of which many are no ``ValueError``.
    """
    try:
        yield
    except (TierStoreError, MemoryError):
        raise
    except Exception as error:
        # zipfile seeks to where no file can be; Arrow has no number for its own errors.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise InputError(f"{path}{what}: {str(error) or type(error).__name__}") from error
