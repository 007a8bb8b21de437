"""Optimizers of the tables of one module: one for all of them, or one for each by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.errors import ConfigError
from tierstore.optim.specs import SGD, OptimizerSpec

REST = "*"
"""Name that stands for all tables that have no optimizer of their own."""
Optimizers: TypeAlias = OptimizerSpec | Mapping[str, OptimizerSpec | None] | None
"""One optimizer for all tables, or one by the name of each table; None freezes."""

_EXAMPLE = (
    "it must be one of tierstore.optim, such as tierstore.optim.RowWiseAdagrad(lr=0.01), or None to freeze "
    "the tables"
)


@dataclass(frozen=True)
class TableGroup:
    """``tables``, which have one parameter group of ``spec``."""

    spec: OptimizerSpec
    tables: tuple[str, ...]


def check_optimizers(optimizer: object) -> None:
    """Raise ConfigError unless it is one of ``Optimizers``; names are not looked at."""
    if isinstance(optimizer, Mapping):
        for name, one in optimizer.items():
            if one is not None and not isinstance(one, OptimizerSpec):
                raise ConfigError(f"the optimizer of table {name!r} is {one!r}; {_EXAMPLE}")
    elif optimizer is not None and not isinstance(optimizer, OptimizerSpec):
        raise ConfigError(
            f"optimizer is {optimizer!r}; the backward pass applies it to the rows, so {_EXAMPLE}, or a dict "
            "of such by the names of tables"
        )


def by_table(optimizer: Optimizers, tables: Sequence[str]) -> dict[str, OptimizerSpec | None]:
    """Return the optimizer of each of ``tables``; None: the table is frozen.

    Raises ConfigError for names that are not among ``tables``, and for tables without an entry.
    """
    check_optimizers(optimizer)
    if not isinstance(optimizer, Mapping):
        return dict.fromkeys(tables, optimizer)
    if unknown := [name for name in optimizer if name not in tables and name != REST]:
        raise ConfigError(f"optimizer names tables {unknown}, and the tables are {list(tables)}")
    missing = [name for name in tables if name not in optimizer]
    if missing and REST not in optimizer:
        raise ConfigError(
            f"optimizer has no entry for tables {missing}; name them, or give all others one as {REST!r}"
        )
    return {name: optimizer[name if name in optimizer else REST] for name in tables}


def groups_of(optimizer: Optimizers, tables: Sequence[str]) -> list[TableGroup]:
    """Return the parameter groups of ``tables``: one for each entry of ``optimizer``, without frozen tables.

    Where all are frozen, they have one group of rows without state.
    """
    each = by_table(optimizer, tables)
    if not isinstance(optimizer, Mapping):
        return [TableGroup(optimizer or SGD(), tuple(tables))]
    found = []
    for entry, spec in optimizer.items():
        own = tuple(name for name in tables if name == entry or (entry == REST and name not in optimizer))
        if spec is not None and own:
            found.append(TableGroup(spec, own))
    return found or [TableGroup(SGD(), tuple(each))]
