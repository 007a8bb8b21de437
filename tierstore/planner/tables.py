"""What the planner must know of a table, where it gets it from, and what a user may demand of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tierstore.config import parse_bytes
from tierstore.errors import ConfigError
from tierstore.placement import ShardingType
from tierstore.planner.curves import MissCurve, Popularity

# Floats of state as a function of the dimension; equal to tierstore.optim's, which a test checks.
STATE_FLOATS = {
    "sgd": lambda dim: 0,
    "rowwise_adagrad": lambda dim: 1,
    "adagrad": lambda dim: dim,
    "adam": lambda dim: 2 * dim,
}
_ROW_ALIGNMENT = 16
MOST_ROWS = 1 << 48


def row_bytes(dim: int, optimizer: str) -> int:
    """Bytes of a row and its optimizer state, padded as docs/design.md says."""
    return -(-4 * (dim + STATE_FLOATS[optimizer](dim)) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


@dataclass(frozen=True)
class TableStats:
    """What was recorded of a table: distinct rows and misses per size, at ``accesses`` lookups per batch."""

    unique_rows: float
    accesses: float
    curve: MissCurve


@dataclass(frozen=True)
class TableSpec:
    """A table to be placed. The first fields are those of EmbeddingBagConfig.

    ``pooling_factor``: mean ids per example and feature. ``popularity`` is used where there are no ``stats``.
    ``touched_rows``: rows that training will ever use; default all of them.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...] = ()
    pooled: bool = True
    weighted: bool = False
    pooling_factor: float = 1.0
    optimizer: str = "rowwise_adagrad"
    popularity: Popularity = field(default_factory=Popularity)
    stats: TableStats | None = None
    touched_rows: int | None = None
    module: str = ""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ConfigError(f"a table needs a name, got {self.name!r}")
        for name in ("num_embeddings", "embedding_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"table {self.name!r}: {name} is {value!r}; it must be a positive integer")
        if self.num_embeddings > MOST_ROWS:
            raise ConfigError(
                f"table {self.name!r}: num_embeddings is {self.num_embeddings}; a table has at most 2^48 rows"
            )
        if len(set(self.feature_names)) < len(self.feature_names):
            raise ConfigError(f"table {self.name!r}: feature_names has a name twice: {self.feature_names}")
        factor = self.pooling_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ConfigError(f"table {self.name!r}: pooling_factor is {factor!r}; it must be positive")
        if self.optimizer not in STATE_FLOATS:
            raise ConfigError(
                f"table {self.name!r}: unknown optimizer {self.optimizer!r}; known: {', '.join(STATE_FLOATS)}"
            )
        touched = self.touched_rows
        if touched is not None and not 1 <= touched <= self.num_embeddings:
            raise ConfigError(
                f"table {self.name!r}: touched_rows is {touched}; it must be from 1 to num_embeddings"
            )
        if not self.feature_names:
            object.__setattr__(self, "feature_names", (self.name,))

    @property
    def rows(self) -> int:
        """Rows that will exist."""
        return self.touched_rows or self.num_embeddings

    def accesses(self, global_batch: int) -> float:
        """Lookups per step."""
        return global_batch * len(self.feature_names) * self.pooling_factor

    def demand(self, global_batch: int) -> tuple[float, MissCurve]:
        """(Distinct rows per step, misses of them by rows of memory.) Recorded numbers of another batch size
        are scaled as the preset popularity scales."""
        accesses = self.accesses(global_batch)
        if self.stats is None:
            return self.popularity.unique_rows(self.rows, accesses), self.popularity.curve(
                self.rows, accesses
            )
        unique = self.stats.unique_rows
        if not math.isclose(accesses, self.stats.accesses, rel_tol=0.01):
            unique *= self.popularity.unique_rows(self.rows, accesses)
            unique /= self.popularity.unique_rows(self.rows, self.stats.accesses)
        return min(unique, float(self.rows), accesses), self.stats.curve


@dataclass(frozen=True)
class ParameterConstraints:
    """Demands on one table; ``None`` leaves the choice to the planner. Names are torchrec's where
    it has them.

    - ``sharding_types``: allowed ones, as ShardingType or their values.
    - ``min_partition``: fewest columns of a shard.
    - ``device_group``: ranks that may hold the table.
    - ``min_hbm_bytes``, ``min_uvm_bytes``: of a tier that the whole table gets at least, as bytes or
      a string ("1GiB").
    - ``tiers``: tiers that may hold it: "hbm" alone keeps every row on devices, "hbm" and "uvm" every row in
      memory; "ssd" with them (the default) allows all three.
    - ``pooling_factor``, ``optimizer``: instead of the table's.
    """

    sharding_types: Sequence[str] | None = None
    min_partition: int | None = None
    device_group: Sequence[int] | None = None
    min_hbm_bytes: int = 0
    min_uvm_bytes: int = 0
    tiers: Sequence[str] | None = None
    pooling_factor: float | None = None
    optimizer: str | None = None

    def __post_init__(self) -> None:
        if self.sharding_types is not None:
            known = [kind.value for kind in ShardingType]
            names = [str(getattr(kind, "value", kind)) for kind in self.sharding_types]
            wrong = [name for name in names if name not in known]
            if wrong or not names:
                raise ConfigError(f"sharding_types {names} must be some of {known}")
            object.__setattr__(self, "sharding_types", tuple(names))
        partition = self.min_partition
        if partition is not None and (not isinstance(partition, int) or partition < 1):
            raise ConfigError(f"min_partition is {self.min_partition!r}; it must be a positive integer")
        for name in ("min_hbm_bytes", "min_uvm_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if self.tiers is not None:
            tiers = set(self.tiers)
            if tiers not in ({"hbm"}, {"hbm", "uvm"}, {"hbm", "uvm", "ssd"}):
                raise ConfigError(
                    f'tiers is {list(self.tiers)}; it must be ["hbm"], ["hbm", "uvm"] or all three'
                )

    @property
    def stays_in_hbm(self) -> bool:
        return self.tiers is not None and set(self.tiers) == {"hbm"}

    @property
    def stays_in_memory(self) -> bool:
        return self.tiers is not None and "ssd" not in self.tiers


def spec_of_config(config: Any, module: str = "", weighted: bool = False) -> TableSpec:
    """A table of any object that has EmbeddingBagConfig's or EmbeddingConfig's fields, ours or torchrec's."""
    if isinstance(config, TableSpec):
        return config
    missing = [name for name in ("num_embeddings", "embedding_dim", "name") if not hasattr(config, name)]
    if missing:
        raise ConfigError(
            f"expected a table configuration, got {type(config).__name__}, which has no {', '.join(missing)}"
        )
    return TableSpec(
        config.name,
        config.num_embeddings,
        config.embedding_dim,
        tuple(getattr(config, "feature_names", None) or ()),
        pooled=hasattr(config, "pooling") and getattr(config.pooling, "value", "") != "NONE",
        weighted=weighted,
        module=module,
    )


_CONFIG_FIELDS = ("name", "num_embeddings", "embedding_dim", "feature_names")
_PLAN_FIELDS = ("pooling_factor", "optimizer", "touched_rows", "popularity", "weighted")
_POOLINGS = ("SUM", "MEAN", "MAX", "NONE")
_IGNORED_FIELDS = (
    *(
        "pooling",
        "data_type",
        "weight_init_max",
        "weight_init_min",
        "init_fn",
        "use_virtual_table",
        "is_weighted",
    ),
    *("num_embeddings_post_pruning", "need_pos", "input_dim", "total_num_buckets"),
)


def specs_of_yaml(items: Any) -> list[TableSpec]:
    """Tables of a tables.yaml: a list of mappings. Raises ConfigError that names the table and field."""
    if not isinstance(items, list) or not items:
        raise ConfigError("tables: expected a list of mappings, one for each table")
    return [_spec_of_mapping(item, i) for i, item in enumerate(items)]


def _spec_of_mapping(item: Any, position: int) -> TableSpec:
    if not isinstance(item, Mapping):
        raise ConfigError(f"tables: entry {position} is {item!r}; it must be a mapping")
    name = item.get("name", f"#{position}")
    unknown = sorted(set(item) - {*_CONFIG_FIELDS, *_PLAN_FIELDS, *_IGNORED_FIELDS})
    if unknown:
        raise ConfigError(
            f"table {name!r}: unknown fields {unknown}; known: those of EmbeddingBagConfig and "
            f"{', '.join(_PLAN_FIELDS)}"
        )
    missing = [key for key in ("name", "num_embeddings", "embedding_dim") if key not in item]
    if missing:
        raise ConfigError(f"table {name!r}: {', '.join(missing)} missing")
    values = {key: item[key] for key in (*_CONFIG_FIELDS, *_PLAN_FIELDS) if key in item}
    for key in ("num_embeddings", "embedding_dim", "touched_rows", "pooling_factor"):
        values[key] = _plain_number(values[key]) if key in values else None
        if values[key] is None:
            del values[key]
    weighted = values.get("weighted", item.get("is_weighted", False))
    if not isinstance(weighted, bool):
        raise ConfigError(f"table {name!r}: weighted is {weighted!r}; it must be true or false")
    values["weighted"] = weighted
    features = values.get("feature_names") or []
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise ConfigError(f"table {name!r}: feature_names is {features!r}; it must be a list of names")
    values["feature_names"] = tuple(features)
    if "popularity" in values:
        try:
            values["popularity"] = Popularity(**values["popularity"])
        except TypeError:
            raise ConfigError(
                f"table {name!r}: popularity is {values['popularity']!r}; it must be a mapping of s "
                "and q, such as {s: 1.1, q: 100}"
            ) from None
    if "optimizer" in values:
        values["optimizer"] = _optimizer_name(values["optimizer"])
    pooling = str(item.get("pooling", "SUM")).upper().removeprefix("POOLINGTYPE.")
    if pooling not in _POOLINGS:
        raise ConfigError(
            f"table {name!r}: pooling is {item['pooling']!r}; it must be one of {list(_POOLINGS)}"
        )
    return TableSpec(pooled=pooling != "NONE", **values)


def _optimizer_name(name: Any) -> str:
    """Of fbgemm's names ("exact_row_wise_adagrad") and those of classes ("RowWiseAdagrad") ours."""
    plain = str(name).lower().replace("_", "").removeprefix("exact")
    return next((known for known in STATE_FLOATS if known.replace("_", "") == plain), str(name))


def _plain_number(value: Any) -> Any:
    """YAML 1.1 reads 1e9 as a string; whole numbers are ints here."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def constraints_of_yaml(items: Any) -> dict[str, ParameterConstraints]:
    """Constraints by table name, of a mapping of mappings."""
    if not isinstance(items, Mapping):
        raise ConfigError("constraints: expected a mapping of table names to mappings")
    known = {item.name for item in fields(ParameterConstraints)}
    result = {}
    for name, values in items.items():
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"constraints of {name!r}: expected a mapping of {sorted(known)}, got {values!r}"
            )
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"constraints of {name!r}: unknown fields {unknown}; known: {sorted(known)}")
        for key in ("sharding_types", "device_group", "tiers"):
            if not isinstance(values.get(key, []), list):
                raise ConfigError(f"constraints of {name!r}: {key} is {values[key]!r}; it must be a list")
        result[str(name)] = ParameterConstraints(**values)
    return result


def stats_of_json(values: Any) -> dict[str, dict[str, Any]]:
    """The tables of a stats file: name → sizes_rows, unique_miss_ratio, unique_rows, accesses (per batch)."""
    tables = values.get("tables") if isinstance(values, Mapping) else None
    if not isinstance(tables, Mapping):
        raise ConfigError(
            'stats: expected {"tables": {NAME: {"sizes_rows": [...], "unique_miss_ratio": [...], ...}}}'
        )
    return dict(tables)


def with_stats(spec: TableSpec, values: Mapping[str, Any]) -> TableSpec:
    """``spec`` with what was recorded of it. ``capacity_miss_ratio`` goes before ``unique_miss_ratio``,
    since rows never written are not read."""
    try:
        misses = values.get("capacity_miss_ratio", values.get("unique_miss_ratio"))
        if misses is None:
            raise ConfigError("neither capacity_miss_ratio nor unique_miss_ratio")
        curve = MissCurve.through(values["sizes_rows"], misses, spec.rows)
        stats = TableStats(float(values["unique_rows"]), float(values["accesses"]), curve)
        if not (0 < stats.unique_rows <= stats.accesses < math.inf):
            raise ConfigError("unique_rows must be positive and at most accesses")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"stats of table {spec.name!r}: {type(error).__name__}: {error}") from error
    return replace(spec, stats=stats)


def prepared(
    specs: Iterable[TableSpec],
    constraints: Mapping[str, ParameterConstraints],
    stats: Mapping[str, Mapping[str, Any]],
    world_size: int,
) -> list[TableSpec]:
    """``specs`` with constraints' and stats' numbers. Raises ConfigError for doubled or unknown tables."""
    tables = list(specs)
    names = [spec.name for spec in tables]
    doubled = (
        sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    )
    if doubled:
        raise ConfigError(f"tables {doubled} are there more than once; names must be unique in a plan")
    if not tables:
        raise ConfigError("there are no tables to plan")
    for kind, mapping in (("constraints", constraints), ("stats", stats)):
        unknown = sorted(set(mapping) - set(names))
        if unknown:
            raise ConfigError(f"{kind} name unknown tables {unknown}; the tables are {names[:20]}")
    for name, demand in constraints.items():
        group = demand.device_group
        if group is not None and (not group or not all(0 <= rank < world_size for rank in group)):
            raise ConfigError(
                f"constraints of {name!r}: device_group {list(group)} must be ranks below {world_size}"
            )
    return [_prepared(spec, constraints.get(spec.name), stats.get(spec.name)) for spec in tables]


def _prepared(
    spec: TableSpec, demand: ParameterConstraints | None, stats: Mapping[str, Any] | None
) -> TableSpec:
    if demand is not None:
        if demand.pooling_factor is not None:
            spec = replace(spec, pooling_factor=demand.pooling_factor)
        if demand.optimizer is not None:
            spec = replace(spec, optimizer=demand.optimizer)
    return spec if stats is None else with_stats(spec, stats)
