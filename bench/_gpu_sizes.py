"""What the parts of ``tierstore bench gpu`` are given: sizes, and tables that fit this card and this host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.row_format import RowFormat

Figures = Iterator[dict[str, Any]]
"""What a part has found, piece by piece: a part that is cut short keeps the pieces before."""
RATIO = 37
"""All rows of the tables, in sizes of the budget of ``hbm``."""
_OF_GPU, _OF_HOST = 0.7, 0.5


def _size(default: int, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Sizes:
    """How much is measured: each is an option of ``tierstore bench gpu``, and has its help."""

    rows: int = _size(1 << 21, "rows of an arena")
    dim: int = _size(64, "embedding dimension")
    batch_size: int = _size(65_536, "examples per batch")
    max_rows: int = _size(40_000_000, "rows of the largest table, before it is scaled to fit the GPU")
    batches: int = _size(96, "batches of a training")
    width: int = _size(1024, "width of the dense layers")
    host_gib: int = _size(0, "GiB of the host's memory, 0: what is free; virtual machines may get more")

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row with row-wise Adagrad."""
        return RowFormat().row_bytes(self.dim, 1)


@dataclass(frozen=True)
class Setting:
    """``device``: of the tables and the dense layers; ``folder``: the batches, which all trainings share."""

    sizes: Sizes
    folder: Path
    device: str = "cuda"


def cardinalities(max_rows: int) -> list[int]:
    """Return the rows of Criteo's tables, of which none has more than ``max_rows``."""
    from tierstore.data import load

    return [table.num_embeddings for table in load("synthetic:criteo", max_rows=max_rows).tables]


def fitting(sizes: Sizes, gpu_bytes: int, host_bytes: int) -> dict[str, Any]:
    """Return tables that fit free memory of the GPU, all in it, and of the host, all in ``uvm``.

    The largest tables are cut to ``max_rows``; ``scale`` is the share of the rows that is left of
    Criteo's. Baselines hold the same rows, so managed memory is never more than the GPU has free.
    """
    whole = cardinalities(1 << 40)
    room = int(min(_OF_GPU * gpu_bytes, _OF_HOST * host_bytes)) // sizes.row_bytes
    low, high = 1, sizes.max_rows
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(rows, middle) for rows in whole) <= room:
            low = middle
        else:
            high = middle - 1
    rows = sum(min(rows, low) for rows in whole)
    return {
        "max_rows": low,
        "table_rows": rows,
        "table_bytes": rows * sizes.row_bytes,
        "scale": rows / sum(whole),
        "hbm_budget_bytes": rows * sizes.row_bytes // RATIO,
    }
