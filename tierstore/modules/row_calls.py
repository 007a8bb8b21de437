"""Calls that read and write rows of tables by their ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from tierstore.modules.engine_calls import EngineCalls
from tierstore.modules.row_arguments import checked_row_ids, float_matrix, state_matrix
from tierstore.modules.table_rules import TableRules
from tierstore.modules.tables import TORCH_DTYPES
from tierstore.optim import OptimizerSpec
from tierstore.optim.fused import FusedOptimizer


class RowCalls(EngineCalls):
    """Calls about rows of the tables ``table_numbers`` of ``engine``."""

    table_numbers: list[int]
    rules: TableRules
    fused_optimizer: FusedOptimizer

    @abstractmethod
    def set_updates(self, count: int) -> None:
        """Set the optimizer's count of updates, as committed with the rows from now on."""

    def spec_of(self, table: int) -> OptimizerSpec:
        """Return the optimizer of a table of the engine."""
        return self.fused_optimizer.spec_of(self.rules.name_of(table))

    def table_number(self, name: str | None) -> int:
        """Return the engine's number of the table called ``name``; None: of the only table."""
        if name is None and len(self.table_numbers) == 1:
            return self.table_numbers[0]
        return self.engine.table_index(name)

    def rows(self, ids: object, table: str | None = None) -> Tensor:
        """Return a copy of the weights of ``ids`` (n,), (n, dim) of the table's dtype; initial values of
        untouched ids."""
        index = self.table_number(table)
        config = self.engine.tables[index]
        columns = [slice(0, config.embedding_dim)]
        (weights,) = self.engine.read_columns(index, checked_row_ids(ids), columns)
        return torch.from_numpy(weights).to(TORCH_DTYPES[config.dtype])

    def optimizer_rows(self, ids: object, table: str | None = None) -> dict[str, Tensor]:
        """Return a copy of the optimizer state of ``ids`` by name: float32, (n,) for state per row, else (n,
        dim)."""
        index = self.table_number(table)
        spec = self.spec_of(index)
        columns = spec.state_columns(self.engine.tables[index].embedding_dim)
        parts = self.engine.read_columns(index, checked_row_ids(ids), list(columns.values()))
        found = dict(zip(columns, map(torch.from_numpy, parts), strict=True))
        return {name: value.view(-1) if name in spec.per_row else value for name, value in found.items()}

    def load_rows(
        self,
        ids: object,
        weight: Tensor,
        optimizer: dict[str, Tensor] | None = None,
        table: str | None = None,
    ) -> None:
        """Overwrite rows: ``weight`` (n, dim); ``optimizer`` as :meth:`optimizer_rows` gives it, None
        keeps the state."""
        index, keys = self.table_number(table), checked_row_ids(ids)
        dim = self.engine.tables[index].embedding_dim
        values = float_matrix("weight", weight, (len(keys), dim))
        spec, state = self.spec_of(index), None
        if optimizer is not None:
            state = state_matrix(spec, optimizer, len(keys), dim)
        elif spec.decays_all:
            state = self.engine.state_as_of(index, keys, self.fused_optimizer.num_updates)
        self.engine.write_rows(index, keys, values, state)

    def reset_parameters(self) -> None:
        """Give all rows the initial values of the seed again, and forget the optimizer's state. A sharded
        collection resets the rows of this rank, so all ranks call it."""
        for table in self.table_numbers:
            self.engine.reset_rows(table)
        self.set_updates(0)

    def touched_ids(self, table: str | None = None) -> Iterator[Tensor]:
        """Yield the ids that some tier holds a row of, int64 (n,) chunks, each id once.

        Rows of other ids have initial values."""
        for ids in self.engine.touched_ids(self.table_number(table)):
            yield torch.from_numpy(ids)
