"""Placement of every row and column of a model's tables, and the bytes of each tier that hold it.

Plain data that the planner writes and sharded collections read: nothing here imports torch or the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
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


STORE_SLACK = 64 << 20
"""Bytes of a rank's store beyond the ``ssd_bytes`` of its shards."""
MOST_STORE_BYTES = 3.0
"""Bytes that a store has a use for, per live byte: a commit may keep as many superseded bytes as are live,
and compaction needs as many again."""


@dataclass(frozen=True)
class Job:
    """The ranks of a running job, as a planner needs to know them. Sizes are bytes of one rank.

    ``rows``: of all tables, as far as training will use them: ``touched_rows`` of the tables that it names.
    ``depth``, ``window``: batches that are fetched and known ahead, ``batch_size``: examples per rank and
    step, ``read_ahead_bytes``: of rows read ahead; None is the planner's default. ``tiers``: the TierConfig
    of all collections; None: each has its own. ``device``: where "hbm" is, "cpu" or "cuda".
    """

    hosts: int
    ranks_per_host: int
    processors_per_rank: float
    hbm_bytes: int
    uvm_bytes: int
    ssd_bytes: int
    rows: int
    depth: int | None = None
    window: int | None = None
    batch_size: int | None = None
    read_ahead_bytes: int | None = None
    tiers: Any = None
    touched_rows: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"


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
    """1 where no other table uses the shard's slots, since constraints promise the table bytes or tiers, or
    HBM has all of its rows; else 0."""
    read_ahead_bytes: int = 0
    """The part of ``uvm_bytes`` for rows that are read ahead; 0: the plan says nothing of it."""


@dataclass(frozen=True)
class TablePlacement:
    """A table's cut. ``predicted_hit_rate``: share of a batch's unique rows found in HBM.
    ``stochastic_rounding``, ``bounds_check``: as in TableOverride."""

    name: str
    sharding_type: ShardingType
    shards: tuple[ShardPlacement, ...]
    predicted_hit_rate: float = 0.0
    module: str = ""
    num_embeddings: int = 0
    embedding_dim: int = 0
    stochastic_rounding: bool | None = None
    bounds_check: str | None = None

    def __str__(self) -> str:
        name = f"{self.module}.{self.name}" if self.module else self.name
        ranks = ", ".join(str(shard.rank) for shard in self.shards)
        sizes = {
            tier: sum(getattr(s, f"{tier}_bytes") for s in self.shards) for tier in ("hbm", "uvm", "ssd")
        }
        text = ", ".join(f"{tier} {size:,} bytes" for tier, size in sizes.items() if size)
        return f"{name}: {self.sharding_type.value} on {ranks}; {text or 'bytes of the configuration'}"


@dataclass(frozen=True)
class ShardingPlan:
    """Placements of all tables for ``world_size`` ranks, in the order of the tables given to the planner."""

    tables: tuple[TablePlacement, ...]
    world_size: int
    ranks_per_host: int
    device: str = ""
    """The device of the topology, "cuda" or "cpu"; empty: any device."""
    report: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The planner's report: the dictionary that ``tierstore plan --json`` writes."""

    @property
    def plan(self) -> dict[str, dict[str, TablePlacement]]:
        """torchrec's shape: module's name → table's name → placement."""
        result: dict[str, dict[str, TablePlacement]] = {}
        for table in self.tables:
            result.setdefault(table.module, {})[table.name] = table
        return result

    def get_plan_for_module(self, module_path: str) -> dict[str, TablePlacement] | None:
        """Return the placements of a module's tables by their names, as torchrec's plans do; None if the
        module has no table."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        """Return a line for every table: what scripts that print their plan show."""
        return "\n".join([f"plan of {self.world_size} ranks", *map(str, self.tables)])

    def table(self, name: str) -> TablePlacement:
        """Return the placement of the table called ``name``. Raises ConfigError when the plan has none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise ConfigError(f"the plan has no table {name!r}; it has {[table.name for table in self.tables]}")

    def on_rank(self, rank: int) -> list[tuple[TablePlacement, ShardPlacement]]:
        """Return the shards that ``rank`` holds, in the plan's order."""
        return [(table, shard) for table in self.tables for shard in table.shards if shard.rank == rank]

    def check(self, tables: Sequence[Any], world_size: int, device: str = "") -> None:
        """Raise ConfigError unless this is a plan for these table configurations, this world size and this
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
        for name in wanted:
            if name in planned and wanted[name] != planned[name]:
                problems.append(
                    f"table {name!r} is {wanted[name]} in the model and {planned[name]} in the plan"
                )
        if problems:
            raise ConfigError(f"this plan is for another model: {'; '.join(problems)}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain types only; :meth:`from_dict` is the inverse (except for ``report``)."""
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
        """Read a plan. Raises ConfigError with the path of a wrong value."""
        plan = _Object("", values)
        world_size, ranks_per_host = plan.integer("world_size", 1), plan.integer("ranks_per_host", 1)
        if world_size % ranks_per_host:
            raise ConfigError(
                f"{_NO_PLAN}ranks_per_host is {ranks_per_host}; it must divide world_size, "
                f"which is {world_size}"
            )
        tables = tuple(_table(table) for table in plan.objects("tables"))
        return cls(tables, world_size, ranks_per_host, plan.text("device", "", known=("", "cpu", "cuda")))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; :meth:`load` reads it."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Return a plan that :meth:`save` wrote, or the JSON of ``tierstore plan``."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        return cls.from_dict(values)


_NO_PLAN = "not a sharding plan: "
_BOUNDS_CHECKS = ("fatal", "warning", "ignore")
_LARGEST = (1 << 63) - 1
_REQUIRED: Any = object()


class _Object:
    """An object of a plan's JSON. ``path``: where it is, such as "tables[0].shards[1].", or empty."""

    def __init__(self, path: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{_NO_PLAN}{path.rstrip('.') or 'it'} is {values!r}; it must be an object")
        self.path, self.values = path, values

    def integer(self, name: str, minimum: int = 0, default: int = _REQUIRED, maximum: int = _LARGEST) -> int:
        value = self._value(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._wrong(
                name, f"a whole number from {minimum} to {'2^63 - 1' if maximum == _LARGEST else maximum}"
            )
        return value

    def share(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise self._wrong(name, "a number from 0 to 1")
        return float(value)

    def choice(self, name: str) -> bool | None:
        value = self._value(name, None)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true, false or null")
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str | None:
        return None if self.values.get(name) is None else self.text(name, known=known)

    def text(self, name: str, default: str = _REQUIRED, known: Sequence[str] = ()) -> str:
        value = self._value(name, default)
        if not isinstance(value, str) or (known and value not in known):
            raise self._wrong(name, f"one of {', '.join(map(repr, known))}" if known else "a string")
        return value

    def objects(self, name: str) -> list[_Object]:
        value = self._value(name, _REQUIRED)
        if not isinstance(value, list | tuple) or not value:
            raise self._wrong(name, "a list, and not empty")
        return [_Object(f"{self.path}{name}[{at}].", item) for at, item in enumerate(value)]

    def has_only(self, names: Sequence[str]) -> None:
        unknown = [name for name in self.values if name not in names]
        if unknown:
            raise ConfigError(f"{_NO_PLAN}{self.path}{unknown[0]} is unknown; use {', '.join(names)}")

    def _value(self, name: str, default: Any) -> Any:
        if name not in self.values and default is _REQUIRED:
            raise ConfigError(f"{_NO_PLAN}{self.path}{name} is missing")
        return self.values.get(name, default)

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        value = self.values[name]
        return ConfigError(f"{_NO_PLAN}{self.path}{name} is {value!r}; it must be {wanted}")


def _table(table: _Object) -> TablePlacement:
    name = table.text("name")
    if not name:
        raise ConfigError(f"{_NO_PLAN}{table.path}name is empty; give the table's")
    kinds = [kind.value for kind in ShardingType]
    return TablePlacement(
        name,
        ShardingType(table.text("sharding_type", known=kinds)),
        tuple(_shard(shard) for shard in table.objects("shards")),
        table.share("predicted_hit_rate", 0.0),
        table.text("module", ""),
        table.integer("num_embeddings", default=0),
        table.integer("embedding_dim", default=0),
        table.choice("stochastic_rounding"),
        table.one_of("bounds_check", _BOUNDS_CHECKS),
    )


def _shard(shard: _Object) -> ShardPlacement:
    shard.has_only([field.name for field in fields(ShardPlacement)])
    values = {
        field.name: shard.integer(
            field.name,
            default=_REQUIRED if field.default is MISSING else field.default,
            maximum=1 if field.name == "own" else _LARGEST,
        )
        for field in fields(ShardPlacement)
    }
    return ShardPlacement(**values)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{_NO_PLAN}an object has {twice!r} more than once")
    return found
