"""What tables.yaml, constraints.yaml and a file of recorded curves mean (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from tierstore.errors import ConfigError
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.curves import Popularity
from tierstore.planner.tables import TableSpec, check_data_type, optimizer_name
from tierstore.planner.topology import plain_number

_CONFIG_FIELDS = ("name", "num_embeddings", "embedding_dim", "feature_names")
_PLAN_FIELDS = ("pooling_factor", "optimizer", "touched_rows", "popularity", "weighted")
_NUMBERS = ("num_embeddings", "embedding_dim", "touched_rows", "pooling_factor")
_POOLINGS = ("SUM", "MEAN", "MAX", "NONE")
_IGNORED_FIELDS = (
    *("pooling", "data_type", "weight_init_max", "weight_init_min", "init_fn", "is_weighted"),
    *("num_embeddings_post_pruning", "need_pos", "input_dim", "total_num_buckets", "use_virtual_table"),
    *("virtual_table_eviction_policy", "enable_embedding_update", "stash_weights"),
)


def specs_of_yaml(items: Any) -> list[TableSpec]:
    """Tables of a tables.yaml: a list of mappings. Raises ConfigError that names the table and field."""
    if not isinstance(items, list) or not items:
        raise ConfigError("tables: expected a list of mappings, one for each table")
    return [_spec_of_mapping(item, i) for i, item in enumerate(items)]


def _spec_of_mapping(item: Any, position: int) -> TableSpec:
    if not isinstance(item, Mapping):
        raise ConfigError(f"tables: entry {position} is {item!r}; it must be a mapping")
    # A field that is there and empty is as good as none.
    item = {key: value for key, value in item.items() if value is not None}
    name = item.get("name", f"#{position}")
    known = {*_CONFIG_FIELDS, *_PLAN_FIELDS, *_IGNORED_FIELDS}
    if set(item) - known:
        raise ConfigError(
            f"table {name!r}: unknown fields {_sorted(set(item) - known)}; known: those of "
            f"EmbeddingBagConfig and {', '.join(_PLAN_FIELDS)}"
        )
    missing = [key for key in ("name", "num_embeddings", "embedding_dim") if key not in item]
    if missing:
        raise ConfigError(f"table {name!r}: {', '.join(missing)} missing")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"tables: entry {position} has the name {name!r}; write it in quotes")
    check_data_type(name, item.get("data_type", "FP32"))
    values = {key: item[key] for key in (*_CONFIG_FIELDS, *_PLAN_FIELDS) if key in item}
    values |= {key: plain_number(values[key]) for key in _NUMBERS if key in values}
    values["weighted"] = values.get("weighted", item.get("is_weighted", False))
    if not isinstance(values["weighted"], bool):
        raise ConfigError(f"table {name!r}: weighted is {values['weighted']!r}; it must be true or false")
    features = values.get("feature_names", [])
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise ConfigError(f"table {name!r}: feature_names is {features!r}; it must be a list of names")
    values["feature_names"] = tuple(features)
    if "popularity" in values:
        values["popularity"] = _popularity(name, values["popularity"])
    if "optimizer" in values:
        values["optimizer"] = optimizer_name(values["optimizer"])
    pooling = str(item.get("pooling", "SUM")).upper().removeprefix("POOLINGTYPE.")
    if pooling not in _POOLINGS:
        raise ConfigError(
            f"table {name!r}: pooling is {item['pooling']!r}; it must be one of {list(_POOLINGS)}"
        )
    return TableSpec(pooled=pooling != "NONE", **values)


def _popularity(name: str, values: Any) -> Popularity:
    try:
        return Popularity(**{key: plain_number(value) for key, value in values.items()})
    except (TypeError, AttributeError):
        raise ConfigError(
            f"table {name!r}: popularity is {values!r}; it must be a mapping of s and q, such as "
            "{s: 1.1, q: 100}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"table {name!r}: {error}") from None


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
                f"constraints of {name!r}: expected a mapping of {_sorted(known)}, got {values!r}"
            )
        if set(values) - known:
            raise ConfigError(
                f"constraints of {name!r}: unknown fields {_sorted(set(values) - known)}; known: "
                f"{_sorted(known)}"
            )
        plain = {key: plain_number(value) for key, value in values.items() if value is not None}
        try:
            result[str(name)] = ParameterConstraints(**plain)
        except ConfigError as error:
            raise ConfigError(f"constraints of {name!r}: {error}") from None
    return result


def stats_of_json(values: Any) -> dict[str, dict[str, Any]]:
    """Return a stats file's tables: name → sizes_rows, unique_miss_ratio, unique_rows, accesses per batch."""
    tables = values.get("tables") if isinstance(values, Mapping) else None
    if not isinstance(tables, Mapping):
        raise ConfigError(
            'stats: expected {"tables": {NAME: {"sizes_rows": [...], "unique_miss_ratio": [...], ...}}}'
        )
    return dict(tables)


def _sorted(names: Iterable[Any]) -> list[Any]:
    """Of a file's keys, which may be of any type."""
    return sorted(names, key=str)
