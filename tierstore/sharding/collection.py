"""Base of the sharded collections: the rows of all ranks, and their commits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.errors import ConfigError, GradientError, InputError
from tierstore.modules.collection import Collection
from tierstore.modules.parts import Part
from tierstore.modules.row_arguments import checked_row_ids, float_matrix, state_matrix
from tierstore.modules.row_shares import TableStep
from tierstore.modules.tables import TORCH_DTYPES, OpenTables
from tierstore.sharding.commits import Commits, end
from tierstore.sharding.input_exchange import InputExchange
from tierstore.sharding.lookups import ExchangedLookups, ShardedLookup
from tierstore.sharding.opening import OpenShards
from tierstore.sharding.peers import in_flight
from tierstore.sharding.row_wise_state import RowWiseStateExchange
from tierstore.sharding.shards import RankShards
from tierstore.sharding.table_views import ShardedTableView


class ShardedCollection(Collection):
    """Base of the sharded collections: this rank's shards, and lookups that ask all ranks.

    All ranks make it, with the same arguments, and call it together.
    """

    collective = True
    lookups: ExchangedLookups

    def __init__(self, opened: OpenShards, lookups: ExchangedLookups) -> None:
        options, engine = opened.options, opened.engine
        tables = OpenTables(engine, range(len(engine.tables)))
        super().__init__(tables, options.optimizer, opened.features, lookups, ShardedTableView)
        self.env, self.plan, self.comms = opened.env, opened.plan, options.comms
        self.tiers, self.routing = options.config, opened.routing
        self.shards = RankShards(self.env, self.plan, self.configs, self.tiers, engine, self.fused_optimizer)
        self._row_wise_state = None if self.frozen else RowWiseStateExchange.of(self.shards)
        self._commits, self._name = options.commits, options.name
        self.env.peers.handled = in_flight()
        if self._commits is not None:
            try:
                self._commits.join(self._name, self.shards)
            except BaseException:
                self.close_here()
                raise

    # -- lookups -------------------------------------------------------------------------

    def begin_exchange(self, features: Any) -> InputExchange:
        """Begin to send the ids of a batch to the ranks that hold their rows. All ranks call it."""
        return self.lookups.begin(features)

    def finish_exchange(self, exchange: InputExchange) -> ShardedLookup:
        """Return the lookup of the rows that all ranks ask this rank for."""
        return self.lookups.finish(exchange)

    def announce_end(self, error: Exception | None) -> InputExchange:
        """Tell the other ranks, in place of :meth:`begin_exchange`, that this rank has no more batches,
        perhaps because of ``error``."""
        return self.lookups.announce_end(error)

    def min_over_ranks(self, value: int) -> int:
        """Return the smallest ``value`` of any rank. All ranks call it."""
        return self.env.min_over_ranks(value)

    def mean_squares(
        self, parts: Sequence[Part], squares_of: Callable[[int], NDArray[np.float32]]
    ) -> Sequence[NDArray[np.float32] | None]:
        """Return what TieredModule.mean_squares returns; shards of some columns add the squares of the other
        columns."""
        if self._row_wise_state is None:
            return super().mean_squares(parts, squares_of)
        return self._row_wise_state.mean_squares(parts, squares_of)

    def next_update(self) -> tuple[Sequence[TableStep], Sequence[partial[None]]]:
        for group in self.fused_optimizer.param_groups:
            if (limit := group["clip_grad_norm"]) is None:
                continue
            tables = group.get("tables", self.table_names())
            if cut := list(filter(self.shards.cuts_columns, tables)):
                raise ConfigError(
                    f"clip_grad_norm is {limit}, and the plan cuts tables {', '.join(cut)} by columns, so "
                    "that no rank has the norm of a row; use another cut, or clip_grad_value"
                )
        return super().next_update()

    def _hooked_name(self, table: str | None) -> str:
        name = self._config(table).name
        if self.shards.cuts_columns(name):
            raise ConfigError(
                f"table {name!r} is cut by columns, so that no rank has the gradient of a row for a gradient "
                "hook; use another cut"
            )
        return str(name)

    def tables_counted_elsewhere(self) -> list[int]:
        """Return the tables that every rank has, on all ranks but the first."""
        if not self.env.rank:
            return []
        shards = [shard for config in self.configs for shard in self.shards.of(config.name)]
        return [shard.local for shard in shards if shard.replica]

    def total_over_ranks(self, value: float) -> float:
        """Return the sum of ``value`` over the ranks. All ranks call it."""
        return self.env.total([value])[0]

    def report_gradients(self, error: GradientError | None) -> None:
        """Raise on every rank if one rank has an error.

        All ranks raise when the backward pass is over, after other callbacks of autograd. A rank that raised
        in the middle would not exchange its dense gradients, which would break DDP. An update of accumulated
        passes comes after them, and raises at once.
        """
        if not self.check_gradients:
            return
        if self.accumulation is not None:
            self.env.share_error(error, GradientError)
            return
        later = torch.autograd.Variable._execution_engine.queue_callback
        later(lambda: later(lambda: self.env.share_error(error, GradientError)))

    # -- commits -------------------------------------------------------------------------

    def commit(self, extra: dict[str, Any] | None = None, tag: str | None = None) -> int:
        """Make the rows of all ranks durable, as one commit: after a crash all ranks are at it, or none.
        With DistributedModelParallel the commit has all collections. All ranks call it; return its number.

        Raises on all ranks: ConfigError without a path, or if a rank fails; StoreFullError if a store is
        full.
        """
        if self._commits is None:
            raise ConfigError("there is no place to commit to; give TierConfig(path=...)")
        return self._commits.commit(extra, tag)

    @property
    def commits(self) -> Commits | None:
        """The commits of all ranks that the collection takes part in; None without a path."""
        return self._commits

    @property
    def is_fresh(self) -> bool:
        """Whether no rows of an earlier commit were found."""
        return self._commits is None or not self._commits.restored(self._name)

    def committed_extra(self) -> dict[str, Any]:
        """Return ``extra`` of the last commit of all ranks."""
        return {} if self._commits is None else self._commits.extra

    def close(self, *, commit: bool = True) -> None:
        """Commit (if there is a path; all ranks do it) and close the engine of this rank. After a commit with
        an ``extra`` it commits nothing, since the extra would not fit later rows.

        While an error is handled (in a ``finally`` or ``except``) it commits nothing either and does not
        wait. The rank tells the other ranks that this rank has stopped, and they raise RankError.

        At a StoreFullError, which all ranks raise, the tables of all ranks stay open: give room
        (``set_ssd``) on the ranks that it names and close again on all, or use ``commit=False``.
        """
        if self.engine.closed:
            return
        end(self.env.peers, self._commits, commit, self.close_here)

    def close_here(self) -> None:
        """Close the engine of this rank without telling the other ranks."""
        super().close(commit=False)
        if self._commits is not None:
            self._commits.leave()

    # -- rows ----------------------------------------------------------------------------

    def table_names(self) -> list[str]:
        return [table.name for table in self.configs]

    def _config(self, table: str | None) -> Any:
        return self.configs[self.config_number(table)]

    def _asked(self, ids: Any, table: str | None) -> tuple[Any, NDArray[np.int64]]:
        """Return the table's configuration and the ids. Every rank raises if a rank's are wrong."""
        error: InputError | None = None
        asked: Any = None
        try:
            config, keys = self._config(table), checked_row_ids(ids)
            asked = (config.name, hashlib.sha256(keys.tobytes()).hexdigest())
        except InputError as raised:
            error, asked = raised, str(raised)
        self.env.check_same({"table or ids": asked})
        if error is not None:
            raise error
        outside = np.flatnonzero((keys < 0) | (keys >= config.num_embeddings))
        if len(outside):
            raise InputError(
                f"table {config.name!r}: id {keys[outside[0]]} at position {outside[0]} is out of range "
                f"[0, {config.num_embeddings})"
            )
        return config, keys

    def rows(self, ids: Any, table: str | None = None) -> Tensor:
        """Return rows as TieredModule.rows does. All ranks call it with the same ids."""
        config, keys = self._asked(ids, table)
        return self.shards.read(config, keys, None)[0].to(TORCH_DTYPES[self.shards.dtype_of(config.name)])

    def optimizer_rows(self, ids: Any, table: str | None = None) -> dict[str, Tensor]:
        """Return state as TieredModule.optimizer_rows does. All ranks call it with the same ids. If the table
        is cut by columns, state kept per row comes from the shard of the first columns."""
        config, keys = self._asked(ids, table)
        spec = self.fused_optimizer.spec_of(config.name)
        parts = self.shards.read(config, keys, spec.state_names)
        return {
            name: part[:, 0] if name in spec.per_row else part
            for name, part in zip(spec.state_names, parts, strict=True)
        }

    def load_rows(
        self, ids: Any, weight: Tensor, optimizer: dict[str, Tensor] | None = None, table: str | None = None
    ) -> None:
        """Overwrite rows as TieredModule.load_rows does. All ranks call it with the same arguments; each
        keeps its share."""
        self._asked(ids, table)
        self.load_own_rows(ids, weight, optimizer, table)

    def load_own_rows(
        self, ids: Any, weight: Tensor, optimizer: dict[str, Tensor] | None = None, table: str | None = None
    ) -> None:
        """Overwrite rows of ``ids`` that are on this rank; unlike :meth:`load_rows`, ranks may give different
        ids."""
        config, keys = self._config(table), checked_row_ids(ids)
        dim, spec = config.embedding_dim, self.fused_optimizer.spec_of(config.name)
        values = float_matrix("weight", weight, (len(keys), dim))
        state = None if optimizer is None else state_matrix(spec, optimizer, len(keys), dim)
        self.shards.write(config, keys, values, state)

    def touched_ids(self, table: str | None = None) -> Iterator[Tensor]:
        """Yield ids as TieredModule.touched_ids does, of the shards on this rank."""
        for ids in self.shards.touched_ids(self._config(table).name):
            yield torch.from_numpy(ids)
