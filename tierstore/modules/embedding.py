"""TieredEmbedding: torch.nn.Embedding whose rows live in tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from tierstore.cache.engine import Table
from tierstore.cache.layout import IdSegment
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, InputError
from tierstore.initializers import as_init, normal
from tierstore.modules.at_once import RowsAtOnce, begun_at_once, finished, new_output
from tierstore.modules.base import TieredModule
from tierstore.modules.bounds import bounds_of
from tierstore.modules.compiling import compiled_as
from tierstore.modules.inputs import NO_PADDING, FeatureLookup, checked_ids
from tierstore.modules.keyed_parts import KeyedFeature, KeyedFeatures
from tierstore.modules.parts import MODES, SequencePart
from tierstore.modules.tables import (
    TORCH_DTYPES,
    HasWeight,
    Opening,
    SharedEngine,
    check_unsupported,
    is_fresh,
    load_table,
    open_tables,
    table_dtype,
)
from tierstore.modules.traced import traced_rows
from tierstore.optim import NOT_GIVEN
from tierstore.optim.tables import Optimizers

_ONLY_KEY = np.zeros(1, np.int64)


class SingleTable(HasWeight, TieredModule):
    """Base of TieredEmbedding and TieredEmbeddingBag: one table, perhaps with a row for padding."""

    def __init__(
        self,
        table: Table,
        padding_idx: int | None,
        weight: Tensor | None,
        opening: Opening,
    ) -> None:
        rows, dim = table.num_embeddings, table.embedding_dim
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise ConfigError(
                f"padding_idx {padding_idx} is outside the {rows} rows of table {table.name!r}; use a row's "
                "number"
            )
        opened = open_tables([table], opening)
        super().__init__(opened.engine, opened.numbers, opening.optimizer)
        self.num_embeddings = rows
        self.embedding_dim = dim
        self.name = table.name
        self._ids_name = f"{table.name}: ids"
        self._output_dtype = TORCH_DTYPES[table.dtype]
        self.padding_idx = None if padding_idx is None else padding_idx % rows
        self._padding = NO_PADDING if self.padding_idx is None else self.padding_idx
        self._padding_row: Tensor | None = None
        mode = self.engine.config.bounds_check_of(table.name)
        self._bounds = bounds_of(table.name, rows, mode)
        self.show_parameters([self])
        if is_fresh(self.engine):  # rows of a store that is opened again stay as they are
            if weight is not None:
                load_table(self, table, weight, "_weight")
            else:
                self._clear_padding_row()
        self._find_padding_row()
        self.engine.call_after_moves(self._find_padding_row)
        self.engine.reset_stats()

    @property
    def table(self) -> Table:
        """The table, as its engine knows it."""
        return self.engine.tables[self.table_numbers[0]]

    def rows_version(self) -> str:
        return self.engine.versions.of(self.table_numbers[0])

    def ids_of(self, given: Tensor) -> Tensor:
        """Return the ids that are looked up for those given, checked."""
        ids = self.on_host(self._ids_name, given)
        return ids if self._bounds is None else self._bounds.kept(ids)

    def on_host(self, name: str, given: Tensor) -> Tensor:
        """Return ids or offsets on the host, checked. A prefetcher that learns what is looked up has moved
        the batch as a whole, and will leave the ids of later ones on the host."""
        if isinstance(given, Tensor) and given.is_cpu:  # no need to ask for the device
            return checked_ids(name, given)
        return checked_ids(name, given, self.engine.device_name, warns=self.observer is None)

    def _clear_padding_row(self) -> None:
        if self.padding_idx is not None:
            self.load_rows(
                [self.padding_idx], torch.zeros(1, self.embedding_dim, dtype=torch.float32, device="cpu")
            )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._clear_padding_row()

    reset_parameters.__doc__ = TieredModule.reset_parameters.__doc__

    def _find_padding_row(self) -> None:
        """Keep the row that padding ids yield, since these ids are not looked up; None stands for zeros."""
        if self.padding_idx is not None:
            row = self.rows([self.padding_idx])[0]
            self._padding_row = row.to(self.engine.device_name) if row.any() else None

    def load_rows(
        self,
        ids: object,
        weight: Tensor,
        optimizer: dict[str, Tensor] | None = None,
        table: str | None = None,
    ) -> None:
        super().load_rows(ids, weight, optimizer, table)
        self._find_padding_row()

    load_rows.__doc__ = TieredModule.load_rows.__doc__

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, name={self.name!r}"


def size_of(embeddings: Tensor) -> tuple[int, int]:
    if embeddings.dim() != 2:
        raise InputError(f"embeddings must have two dimensions, got shape {tuple(embeddings.shape)}")
    return embeddings.size(0), embeddings.size(1)


class TieredEmbedding(SingleTable):
    """Rows by id: torch.nn.Embedding with its positional arguments, and rows in tiers.

    The backward pass applies ``optimizer`` to the rows looked up; there is no ``weight`` parameter.

    Args:
        num_embeddings, embedding_dim: of the table; up to 2**48 rows, of which touched rows take space.
        padding_idx: ids that yield this row, zeros unless it is loaded, and never update it.
        max_norm, scale_grad_by_freq: must stay at their defaults (ConfigError).
        norm_type, sparse: accepted, without effect: gradients are never materialised.
        _weight: initial rows (num_embeddings, embedding_dim); ignored when a committed store is opened again.
        _freeze: make no updates, as with ``optimizer=None``.
        device: where ``hbm`` is, and outputs are: the CPU or a GPU; None: as ``config`` says.
        dtype: of weights and outputs: torch.float32, torch.float16 or torch.bfloat16; that of ``_weight``, or
            float32, if None. Every tier holds this dtype, beside optimizer state in float32. Updates compute
            in float32 and round the weights; ``TierConfig.stochastic_rounding`` says how.
        config: budgets and places of the tiers; the default one if None.
        optimizer: one of tierstore.optim, without which the table can only be read; None freezes it.
        seed, init: initial rows are a function of these and ``name``; ``init`` is one of
            tierstore.initializers, normal(0, 1) if None. Tables of one model should differ in name or seed.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        config: TierConfig | None = None,
        optimizer: Optimizers = NOT_GIVEN,
        seed: int = 0,
        init: object = None,
        name: str = "embedding",
        _shared: SharedEngine | None = None,
    ) -> None:
        check_unsupported(max_norm, scale_grad_by_freq)
        rule, kind = as_init(init, normal(0.0, 1.0)), table_dtype(dtype, _weight)
        table = Table(name, num_embeddings, embedding_dim, rule, dtype=kind)
        opening = Opening(config, None if _freeze else optimizer, seed, _shared, device)
        super().__init__(table, padding_idx, _weight, opening)
        feature = KeyedFeature(table.name, 0, self.table_numbers[0], num_embeddings, MODES["sum"])
        self._features = KeyedFeatures([feature], self._padding)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **options: Any,
    ) -> TieredEmbedding:
        """Make a table of these rows (num_embeddings, embedding_dim). ``options``: the keyword-only
        arguments."""
        rows, dim = size_of(embeddings)
        arguments = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze)
        return cls(rows, dim, *arguments, **options)

    def lookup_inputs(self, input: Tensor) -> tuple[Tensor, ...]:
        return (input,)

    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[Tensor, ...]:
        return (ids,)

    def make_lookup(self, input: Tensor) -> FeatureLookup:
        ids, table = self.ids_of(input), self.table_numbers[0]
        given = ids.data_ptr(), ids.numel(), ids.dtype is torch.int32
        segment = IdSegment(self.name, *given, table, self.num_embeddings, self._padding)
        group = self.engine.group_of(table)
        return FeatureLookup([SequencePart(group, group.batch([segment]), [])], (), [[0]], [ids.numel()])

    def _traced(self, input: Tensor) -> Tensor:
        (rows,), _ = traced_rows(self, (input, None, None, None), [input.numel()], [self.embedding_dim])
        return self._shaped(rows, input)

    @compiled_as(_traced)
    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ``input``, int64 or int32 of any shape (*), as (*, embedding_dim) of the table's
        dtype."""
        rows = self._rows_at_once(input)
        if rows is None:
            (rows,) = self.rows_one_by_one(self.find_lookup(input))
        return self._shaped(rows, input)

    def _rows_at_once(self, input: Tensor) -> Tensor | None:
        """Return the rows of the ids if one native call can find and copy them; None also for wrong ids."""
        own = self.__dict__  # which takes less time than attributes of an nn.Module one by one
        group = own["engine"].group_of(own["table_numbers"][0])
        if (begun := begun_at_once(self, group)) is None:
            return None
        ids = input if own["_bounds"] is None and isinstance(input, Tensor) else self.ids_of(input)
        if (out := new_output(ids.numel(), own["embedding_dim"])) is None:
            return None
        copy, features = begun[0].copy_each, own["_features"].native
        made = copy(features, ids, out.data_ptr())
        if made is NotImplemented:
            made = copy(features, self.ids_of(input), out.data_ptr())
        if made is None or made is NotImplemented:  # the latter without DLPack's exchange
            return None
        lookup = RowsAtOnce(group, made[0], out, _ONLY_KEY)
        return finished(self, lookup, begun, made)

    def _shaped(self, rows: Tensor, input: Tensor) -> Tensor:
        if input.dim() != 1:
            rows = rows.view(*input.shape, self.embedding_dim)
        if self._output_dtype is not torch.float32:
            rows = rows.to(self._output_dtype)
        if self._padding_row is None:
            return rows
        is_padding = torch.eq(input, self._padding)
        if self._bounds is not None and self._padding == 0:  # ids out of range are looked up as id 0
            is_padding = is_padding | torch.lt(input, 0) | torch.ge(input, self.num_embeddings)
        return torch.where(is_padding.to(rows.device).unsqueeze(-1), self._padding_row, rows)
