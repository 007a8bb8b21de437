"""What a state dict holds in place of the rows of a table that is too large for it.

A mark is a small tensor of bytes, which torch.save, safetensors and torch.distributed.checkpoint keep. A mark
names the version of the rows; loading the mark is an error unless the table has rows of this version.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tierstore.cache.engine import Table
from tierstore.config import format_bytes
from tierstore.errors import StoreMismatchError

logger = logging.getLogger("tierstore")

STATE_DICT_LIMIT = 1 << 30
"""State dicts have the rows and optimizer state of tables whose weights take up to this many bytes. Of a
larger table they have a mark (:func:`mark`) instead: commit() keeps its rows."""

_PREFIX = b"tierstore left out rows of version "
_DIGITS = 32


def is_large(table: Table) -> bool:
    """Return whether state dicts leave the rows of a table out."""
    return 4 * table.num_embeddings * table.embedding_dim > STATE_DICT_LIMIT


def mark(version: str, table: Table, key: str) -> Tensor:
    """Return what a state dict has under ``key`` for rows of this version, with a warning."""
    size = format_bytes(4 * table.num_embeddings * table.embedding_dim)
    logger.warning("%s (%s if dense) is in this state dict without its rows: commit() keeps them", key, size)
    return bare_mark(version)


def bare_mark(version: str) -> Tensor:
    """Return what stands for rows of this version in a state dict."""
    return torch.frombuffer(bytearray(_PREFIX + version.encode("ascii")), dtype=torch.uint8)


def is_mark(value: object) -> bool:
    """Return whether a value of a state dict stands for rows that were left out."""
    if getattr(value, "is_meta", False):
        return True
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.uint8
        and value.shape == (len(_PREFIX) + _DIGITS,)
        and bytes(value[: len(_PREFIX)].tolist()) == _PREFIX
    )


def check_mark(value: Tensor, version: str, key: str) -> None:
    """Raise ``StoreMismatchError`` unless the rows that were left out are of this ``version``."""
    if not value.is_meta and bytes(value[len(_PREFIX) :].tolist()) == version.encode("ascii"):
        return
    raise StoreMismatchError(
        f"{key}: this state dict was made without the rows of the table, and the table has other rows now. "
        "Save and restore tables too large for state dicts by tierstore.checkpoint.save and restore; "
        "or commit() them before state_dict(), and open their TierConfig(path=...) at that commit before "
        "load_state_dict()"
    )
