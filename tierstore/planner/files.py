"""What tables.yaml, constraints.yaml and a file of recorded curves mean (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tierstore.errors import ConfigError
from tierstore.planner.checks import fields_of, must_be, require
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.curves import Popularity
from tierstore.planner.tables import TableSpec, dtype_of

_NEEDED = ("name", "num_embeddings", "embedding_dim")
_FIELDS = ("feature_names", "pooling_factor", "optimizer", "touched_rows", "popularity", "weighted")
_POOLINGS = ("SUM", "MEAN", "MAX", "NONE")
_OTHER_FIELDS = (
    *("pooling", "data_type", "weight_init_max", "weight_init_min", "init_fn", "is_weighted"),
    *("num_embeddings_post_pruning", "need_pos", "input_dim", "total_num_buckets", "use_virtual_table"),
    *("virtual_table_eviction_policy", "enable_embedding_update", "stash_weights"),
)
"""Other fields of EmbeddingBagConfig."""


def specs_of_yaml(items: Any) -> list[TableSpec]:
    """Return the tables of a tables.yaml, a list of mappings.

    Raises ConfigError that names the table and field.
    """
    require(isinstance(items, list) and items, "tables: expected a list of mappings, one for each table")
    return [_spec_of_mapping(item, i) for i, item in enumerate(items)]


def _spec_of_mapping(item: Any, position: int) -> TableSpec:
    must_be(f"tables: entry {position}", item, isinstance(item, Mapping), "a mapping")
    name = item.get("name", f"#{position}")
    where, known = f"table {name!r}", (*_NEEDED, *_FIELDS, *_OTHER_FIELDS)
    item = {**fields_of(item, where, known, _NEEDED), "name": name}  # which may look like a number
    message = f"tables: entry {position} has the name {name!r}; write it in quotes"
    require(name and isinstance(name, str), message)
    values = {key: item[key] for key in (*_NEEDED, *_FIELDS) if key in item}
    values["dtype"] = dtype_of(name, item.get("data_type", "FP32"))
    values["weighted"] = item.get("weighted", item.get("is_weighted", False))
    if "popularity" in values:
        values["popularity"] = _popularity(where, values["popularity"])
    pooling = str(item.get("pooling", "SUM")).upper().removeprefix("POOLINGTYPE.")
    must_be(f"{where}: pooling", item.get("pooling"), pooling in _POOLINGS, f"one of {list(_POOLINGS)}")
    return TableSpec(pooled=pooling != "NONE", **values)


def _popularity(where: str, values: Any) -> Popularity:
    known = isinstance(values, Mapping) and set(values) <= {"s", "q"}
    must_be(f"{where}: popularity", values, known, "a mapping of s and q, such as {s: 1.1, q: 100}")
    try:
        return Popularity(**fields_of(values, where, ("s", "q")))
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{where}: popularity: {error}") from None


def constraints_of_yaml(items: Any) -> dict[str, ParameterConstraints]:
    """Return the constraints by table name, of a mapping of mappings."""
    require(isinstance(items, Mapping), "constraints: expected a mapping of table names to mappings")
    known, result = [item.name for item in fields(ParameterConstraints)], {}
    for name, values in items.items():
        where = f"constraints of {name!r}"
        given = fields_of({} if values is None else values, where, known)
        try:
            result[str(name)] = ParameterConstraints(**given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return result


def stats_of_json(values: Any) -> dict[str, dict[str, Any]]:
    """Return a stats file's tables: name → sizes_rows, unique_miss_ratio, unique_rows, accesses per batch."""
    tables = values.get("tables") if isinstance(values, Mapping) else None
    expected = '{"tables": {NAME: {"sizes_rows": [...], "unique_miss_ratio": [...], ...}}}'
    require(isinstance(tables, Mapping), f"stats: expected {expected}")
    return dict(tables or {})
