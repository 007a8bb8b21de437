"""What stands for the weight tensor of a collection's table: reads and writes rows as a tensor would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tierstore.cache.engine import Table
from tierstore.errors import ConfigError, InputError
from tierstore.modules.left_out import is_large
from tierstore.modules.row_arguments import on_host

_CHANGED = "change them by weight[ids] = rows, by weight.copy_(rows) or by load_rows()"
_NO_GRADIENT = (
    "weight would have no gradient here, since rows are in tiers: read it under torch.no_grad(), or as "
    "weight.detach(), which is a copy; to train rows, look them up by the collection"
)


class WeightHolder(Protocol):
    """The part of a view of a table that its weight uses."""

    @property
    def table(self) -> Table: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_trained(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def rows(self, ids: object) -> Tensor: ...

    def load_rows(self, ids: object, weight: Tensor) -> None: ...


class TableWeight:
    """The weights (num_embeddings, embedding_dim) of a table whose rows are in tiers.

    The object has the shape, dtype and device of a tensor. ``weight[ids]``, tensors' methods and torch's
    functions read copies of rows; ``weight[ids] = rows`` and ``weight.copy_(rows)`` write rows. Raises
    ConfigError where a tensor would have a gradient, and for changes in place; InputError where all rows are
    asked of a table that is too large for one tensor.
    """

    grad = None
    """Gradients of tables are never kept."""
    is_leaf = True
    ndim = 2

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._holder.table.num_embeddings, self._holder.table.embedding_dim))

    @property
    def dtype(self) -> torch.dtype:
        return self._holder.dtype

    @property
    def device(self) -> torch.device:
        return self._holder.device

    @property
    def requires_grad(self) -> bool:
        """Whether backward passes update the table."""
        return self._holder.is_trained

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: object) -> Tensor:
        """Return a copy of rows: of one id (dim,), of a slice or of ids (n,)."""
        self._refuse_gradient()
        if isinstance(ids, int):
            return self._rows([range(len(self))[ids]])[0]
        return self._rows(self._ids(ids))

    def __setitem__(self, ids: object, rows: object) -> None:
        """Write rows; one row is written to all ids."""
        chosen = self._ids([range(len(self))[ids]] if isinstance(ids, int) else ids)
        values = on_host(rows, self.dtype)
        self._holder.load_rows(chosen, values.expand(len(chosen), self.shape[1]))

    def copy_(self, rows: object) -> TableWeight:
        """Write all rows."""
        self[:] = rows
        return self

    def detach(self) -> Tensor:
        """Return a copy of all rows. Raises InputError for a table that is too large for one tensor."""
        if is_large(self._holder.table):
            raise InputError(
                f"table {self._holder.table.name!r} is too large for one tensor ({len(self):,} rows); read "
                "some of them by weight[ids] or rows(ids)"
            )
        return self._rows(torch.arange(len(self), device="cpu"))

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a table's weight has no attribute {name!r}")
        if name == "data" or name.endswith("_"):
            raise ConfigError(f"weight.{name} would change rows that are in tiers; {_CHANGED}")
        self._refuse_gradient()
        return getattr(self.detach(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Let torch's functions take copies of all rows."""
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            raise ConfigError(f"{func.__name__} would change rows that are in tiers; {_CHANGED}")
        return func(*map(_read, args), **{name: _read(value) for name, value in (kwargs or {}).items()})

    def _ids(self, ids: object) -> Tensor:
        if isinstance(ids, slice):
            return torch.arange(*ids.indices(len(self)), device="cpu")
        return on_host(ids)

    def _rows(self, ids: object) -> Tensor:
        return self._holder.rows(ids).to(self.device)

    def _refuse_gradient(self) -> None:
        if self.requires_grad and torch.is_grad_enabled():
            raise ConfigError(_NO_GRADIENT)

    def __repr__(self) -> str:
        return f"TableWeight({self._holder.table.name!r}, {tuple(self.shape)}, {self.dtype})"


def _read(value: object) -> object:
    if isinstance(value, TableWeight):
        value._refuse_gradient()
        return value.detach()
    return type(value)(map(_read, value)) if isinstance(value, list | tuple) else value
