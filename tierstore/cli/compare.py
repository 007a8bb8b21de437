"""Bit-for-bit comparison of two training runs: touched rows, their optimizer state, dense parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.cli.trainer import Trainer
from tierstore.data import Batch
from tierstore.modules.tables import without_rows

CHUNK = 1 << 16
"""Rows that are read and compared at a time."""
_MERGE_AT = 1 << 22
"""Ids of a table that are collected before repeats are taken out, which bounds the memory."""


@dataclass(frozen=True)
class Comparison:
    """The number of compared rows, and the place of the first difference, if any."""

    rows: int
    difference: str | None = None

    @property
    def bit_identical(self) -> bool:
        return self.difference is None


def touched_ids(batches: Iterable[Batch]) -> dict[str, NDArray[np.int64]]:
    """Return the distinct ids by key of the batches' sparse part, ascending."""
    parts: dict[str, list[NDArray[np.int64]]] = {}
    for batch in batches:
        for key, jagged in batch.sparse.to_dict().items():
            chunks = parts.setdefault(key, [])
            chunks.append(jagged.values().numpy())
            if sum(map(len, chunks[1:])) > max(_MERGE_AT, len(chunks[0])):
                chunks[:] = [np.unique(np.concatenate(chunks))]
    return {key: np.unique(np.concatenate(chunks)) for key, chunks in parts.items()}


def compare(left: Trainer, right: Trainer, ids: Mapping[str, NDArray[np.int64]]) -> Comparison:
    """Compare the rows ``ids`` (by table) of two runs, their optimizer state, and the dense parameters."""
    rows = 0
    for table, wanted in ids.items():
        for start in range(0, len(wanted), CHUNK):
            chunk = torch.from_numpy(wanted[start : start + CHUNK])
            rows += len(chunk)
            theirs = _row_tensors(right, table, chunk)
            for name, tensor in _row_tensors(left, table, chunk).items():
                if not same_bits(tensor, theirs[name]):
                    first = int(chunk[_first_difference(tensor, theirs[name])])
                    return Comparison(rows, f"{name} of row {first} of table {table!r}")
    others = dense_tensors(right)
    for name, tensor in dense_tensors(left).items():
        if not same_bits(tensor, others[name]):
            return Comparison(rows, f"dense parameter {name}")
    return Comparison(rows)


def dense_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the parameters and buffers of the model outside its tables, by name."""
    with without_rows():
        return dict(trainer.model.state_dict())


def _row_tensors(trainer: Trainer, table: str, ids: Tensor) -> dict[str, Tensor]:
    state = trainer.embeddings.optimizer_rows(ids, table=table)
    return {"weight": trainer.embeddings.rows(ids, table=table), **state}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether shape, dtype and bytes are equal; unlike for ``==``, 0.0 is not -0.0 and NaN is itself."""
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _first_difference(left: Tensor, right: Tensor) -> int:
    """Return the row of the first difference of two tensors of one shape and dtype."""
    different = _bytes(left) != _bytes(right)
    return int(different.nonzero()[0]) // (different.numel() // len(left))
