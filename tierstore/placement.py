"""Where every row and column of a model's tables is, and how many bytes of each tier hold it.

Plain data that the planner writes and sharded collections read: nothing here imports torch or the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, unique
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError


@unique
class ShardingType(str, Enum):
    """How a table is cut. The values are torchrec's."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ShardPlacement:
    """A rectangle of a table on one rank, and its bytes in each tier, all metadata included.

    ``hbm_bytes`` is on the rank's device; ``uvm_bytes`` and ``ssd_bytes`` are the rank's part of its host's.
    ``hbm_rows`` and ``uvm_rows`` are the slots that these bytes hold (0 for what is not a cache slot).
    """

    rank: int
    row_start: int
    rows: int
    column_start: int
    columns: int
    hbm_bytes: int
    uvm_bytes: int
    ssd_bytes: int
    hbm_rows: int = 0
    uvm_rows: int = 0
    own: int = 0
    """1 where constraints promise the table bytes or tiers: its slots are its own then."""


@dataclass(frozen=True)
class TablePlacement:
    """A table's cut. ``predicted_hit_rate``: share of a batch's unique rows found in HBM."""

    name: str
    sharding_type: ShardingType
    shards: tuple[ShardPlacement, ...]
    predicted_hit_rate: float = 0.0
    module: str = ""
    num_embeddings: int = 0
    embedding_dim: int = 0


@dataclass(frozen=True)
class ShardingPlan:
    """Placements of all tables for ``world_size`` ranks, in the order of the tables given to the planner."""

    tables: tuple[TablePlacement, ...]
    world_size: int
    ranks_per_host: int
    device: str = ""
    """"cuda" or "cpu": what the topology was of; empty: any."""
    report: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the planner found out: the dictionary that ``tierstore plan --json`` writes."""

    @property
    def plan(self) -> dict[str, dict[str, TablePlacement]]:
        """torchrec's shape: module's name → table's name → placement."""
        result: dict[str, dict[str, TablePlacement]] = {}
        for table in self.tables:
            result.setdefault(table.module, {})[table.name] = table
        return result

    def table(self, name: str) -> TablePlacement:
        """The placement of the table called ``name``. Raises ConfigError when the plan has none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise ConfigError(f"the plan has no table {name!r}; it has {[table.name for table in self.tables]}")

    def on_rank(self, rank: int) -> list[tuple[TablePlacement, ShardPlacement]]:
        """The shards that ``rank`` holds, in the plan's order."""
        return [(table, shard) for table in self.tables for shard in table.shards if shard.rank == rank]

    def check(self, tables: Sequence[Any], world_size: int, device: str = "") -> None:
        """Raises ConfigError unless this is a plan for these table configurations, this world size and this
        kind of device (empty: any)."""
        if device and self.device and device != self.device:
            raise ConfigError(
                f'the plan is for device "{self.device}" and the tables are on "{device}"; plan again with '
                f'Topology(..., device="{device}")'
            )
        if world_size != self.world_size:
            raise ConfigError(
                f"the plan is for {self.world_size} ranks and there are {world_size}; plan again for this "
                "world size"
            )
        planned = {table.name: (table.num_embeddings, table.embedding_dim) for table in self.tables}
        wanted = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
        problems = [f"no table {name!r} in the plan" for name in wanted if name not in planned]
        problems += [
            f"table {name!r} of the plan is not in the model" for name in planned if name not in wanted
        ]
        names = [table.name for table in self.tables]
        problems += [
            f"table {name!r} is in the plan {names.count(name)} times"
            for name in planned
            if names.count(name) > 1
        ]
        for name in wanted.keys() & planned.keys():
            if wanted[name] != planned[name]:
                problems.append(
                    f"table {name!r} is {wanted[name]} in the model and {planned[name]} in the plan"
                )
        if problems:
            raise ConfigError(f"this plan is for another model: {'; '.join(problems)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain types only; :meth:`from_dict` is the inverse (but for ``report``)."""
        return {
            "world_size": self.world_size,
            "ranks_per_host": self.ranks_per_host,
            "device": self.device,
            "tables": [
                {**asdict(table), "sharding_type": table.sharding_type.value} for table in self.tables
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardingPlan:
        """Raises ConfigError for what is not a plan."""
        try:
            tables = tuple(_table(item) for item in values["tables"])
            device = str(values.get("device", ""))
            return cls(tables, int(values["world_size"]), int(values["ranks_per_host"]), device)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a sharding plan: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """A plan that :meth:`save` wrote, or the JSON of ``tierstore plan``."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        return cls.from_dict(values)


_SHARD_FIELDS = tuple(ShardPlacement.__dataclass_fields__)
_TABLE_FIELDS = ("name", "predicted_hit_rate", "module", "num_embeddings", "embedding_dim")


def _table(item: Mapping[str, Any]) -> TablePlacement:
    shards = tuple(
        ShardPlacement(**{key: int(shard[key]) for key in _SHARD_FIELDS if key in shard})
        for shard in item["shards"]
    )
    known = {key: item[key] for key in _TABLE_FIELDS if key in item}
    return TablePlacement(sharding_type=ShardingType(item["sharding_type"]), shards=shards, **known)
