"""The tables of a sharded collection in the form of its state dicts."""

from __future__ import annotations

import hashlib
from typing import Any

from tierstore.cache.engine import Table
from tierstore.modules.collection import TableView
from tierstore.modules.features import table_of
from tierstore.modules.left_out import mark
from tierstore.sharding.shard_views import ShardedValues
from tierstore.sharding.shards import RankShards


class ShardedTableView(TableView):
    """One whole table of a sharded collection; its rows are read and written by all ranks together."""

    @property
    def table(self) -> Table:
        return table_of(self.config)

    @property
    def _shards(self) -> RankShards:
        shards: Any = self.collection.shards
        assert isinstance(shards, RankShards)
        return shards

    def rows_version(self) -> str:
        """Return the versions of the shards on all ranks, which call it together."""
        everyone = self._shards.env.gather_objects(self._shards.rows_version(self.name))
        return hashlib.sha256(repr(everyone).encode()).hexdigest()[:32]

    def save_weight(self, destination: dict[str, Any], key: str) -> None:
        values = ShardedValues(self._shards, self.name)
        if not values.are_sharded:
            super().save_weight(destination, key)
        elif values.are_small:
            destination[key] = values.view()
        else:
            destination[key] = mark(self.rows_version(), self.table, key)

    def load_weight(self, weight: Any, key: str) -> None:
        if hasattr(weight, "local_shards"):
            ShardedValues(self._shards, self.name).load(weight, key)
        else:
            super().load_weight(weight, key)
