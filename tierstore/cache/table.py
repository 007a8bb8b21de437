"""What a module tells its engine about a table."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from tierstore.errors import ConfigError
from tierstore.initializers import Init
from tierstore.optim.base import OptimizerSpec
from tierstore.row_format import TABLE_DTYPES


@dataclass(frozen=True)
class Table:
    """A table that an engine opens, or a shard of a table.

    A shard keeps the ids of its table, of which at most ``rows`` occur; it has the initial values of
    ``origin`` (the table's name) from column ``column`` on. ``dtype``: of the weights. ``optimizer``: None:
    the engine's.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    init: Init
    origin: str | None = None
    column: int = 0
    rows: int | None = None
    dtype: str = "fp32"
    optimizer: OptimizerSpec | None = None

    @property
    def max_rows(self) -> int:
        """The number of different ids that may occur."""
        return self.num_embeddings if self.rows is None else self.rows

    def __post_init__(self) -> None:
        if self.dtype not in TABLE_DTYPES:
            raise ConfigError(
                f"table {self.name!r}: dtype is {self.dtype!r}; it must be one of {', '.join(TABLE_DTYPES)}"
            )
        for name in ("num_embeddings", "embedding_dim"):
            value = getattr(self, name)
            if isinstance(value, Integral):  # NumPy's, which JSON does not know
                object.__setattr__(self, name, int(value))
