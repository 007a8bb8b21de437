"""What the planner must know of a table, and where it gets it from."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tierstore.config import TierConfig, is_integer, is_number
from tierstore.errors import ConfigError
from tierstore.planner.checks import must_be, require
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.curves import MissCurve, Popularity
from tierstore.row_format import TABLE_DTYPES, RowFormat

# Floats of state per column and per row; equal to tierstore.optim's, which a test checks.
STATE_FLOATS = {
    **{"sgd": (0, 0), "rowwise_adagrad": (0, 1)},
    **dict.fromkeys(("momentum_sgd", "lars_sgd", "adagrad"), (1, 0)),
    **dict.fromkeys(("adam", "adamw", "lamb"), (2, 0)),
    **dict.fromkeys(("partial_rowwise_adam", "partial_rowwise_lamb"), (1, 1)),
}
STATE_FLOATS |= {
    f"{name}:decoupled_global": (columns, rows + 1)
    for name, (columns, rows) in STATE_FLOATS.items()
    if name not in ("adamw", "lars_sgd", "lamb", "partial_rowwise_lamb")
}
"""With weight decay of all rows, the number of a row's last update comes on top."""
WHOLE_ROWS = {"lars_sgd", "lamb", "partial_rowwise_lamb"}
"""Optimizers whose updates need all columns of a row, so that tables cannot be cut by columns."""
MOST_ROWS = 1 << 48
MOST_COLUMNS = 1 << 20
MOST_IDS = 1 << 30  # of an example and feature


@dataclass(frozen=True)
class TableStats:
    """What was recorded of a table: distinct rows and misses per size, at ``accesses`` lookups per batch."""

    unique_rows: float
    accesses: float
    curve: MissCurve


@dataclass(frozen=True)
class TableSpec:
    """A table to be placed. The first fields are fields of EmbeddingBagConfig.

    ``pooling_factor``: mean ids per example and feature. ``popularity`` is used where there are no ``stats``.
    ``touched_rows``: rows that training will ever use; default all of them. ``dtype``: of weights; ``tiers``:
    says the dtypes of lower tiers; None: the same.
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
    dtype: str = "fp32"
    tiers: TierConfig | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        where, factor, touched = f"table {self.name!r}", self.pooling_factor, self.touched_rows
        require(self.name and isinstance(self.name, str), f"a table needs a name, got {self.name!r}")
        rows, columns, features = self.num_embeddings, self.embedding_dim, self.feature_names
        must_be(f"{where}: num_embeddings", rows, is_integer(rows, 1), "a positive integer")
        must_be(f"{where}: embedding_dim", columns, is_integer(columns, 1), "a positive integer")
        require(rows <= MOST_ROWS, f"{where}: num_embeddings is {rows}; a table has at most 2^48 rows")
        message = f"embedding_dim is {columns}; plans are made for rows of {MOST_COLUMNS} columns at most"
        require(columns <= MOST_COLUMNS, f"{where}: {message}")
        must_be(f"{where}: dtype", self.dtype, self.dtype in TABLE_DTYPES, f"one of {TABLE_DTYPES}")
        names = isinstance(features, list | tuple) and all(isinstance(name, str) for name in features)
        must_be(f"{where}: feature_names", features, names, "a list of names")
        require(len(set(features)) == len(features), f"{where}: feature_names has a name twice: {features}")
        must_be(f"{where}: weighted", self.weighted, isinstance(self.weighted, bool), "true or false")
        positive = is_number(factor) and 0 < factor <= MOST_IDS
        must_be(f"{where}: pooling_factor", factor, positive, f"positive and {MOST_IDS} at most")
        object.__setattr__(self, "optimizer", optimizer_name(self.optimizer))
        message = f"unknown optimizer {self.optimizer!r}; known: {', '.join(STATE_FLOATS)}"
        require(self.optimizer in STATE_FLOATS, f"{where}: {message}")
        known = touched is None or is_integer(touched, 1, rows)
        must_be(f"{where}: touched_rows", touched, known, "from 1 to num_embeddings")
        object.__setattr__(self, "feature_names", tuple(features) or (self.name,))

    def row_bytes(self, tier: str = "hbm", columns: int | None = None) -> int:
        """Return the bytes of a row, or of ``columns`` of it, and its optimizer state in a tier."""
        format = RowFormat(self.dtype) if self.tiers is None else self.tiers.formats(self.dtype)[tier]
        dim = self.embedding_dim if columns is None else columns
        per_column, per_row = STATE_FLOATS[self.optimizer]
        return format.row_bytes(dim, per_column * dim + per_row)

    @property
    def rows(self) -> int:
        """Rows that will exist."""
        return self.touched_rows or self.num_embeddings

    def accesses(self, global_batch: int) -> float:
        """Return the lookups per step."""
        return global_batch * len(self.feature_names) * self.pooling_factor

    def demand(self, global_batch: int) -> tuple[float, MissCurve]:
        """Return the unique rows per step and their misses by rows of memory. Recorded numbers of another
        batch size are scaled as the preset popularity scales."""
        accesses = self.accesses(global_batch)
        preset, curve = self.popularity.demand(self.rows, accesses)
        if self.stats is None:
            return preset, curve
        unique = self.stats.unique_rows
        if not math.isclose(accesses, self.stats.accesses, rel_tol=0.01):
            unique *= preset / self.popularity.demand(self.rows, self.stats.accesses)[0]
        return min(unique, float(self.rows), accesses), self.stats.curve


def spec_of_config(config: Any, module: str = "", weighted: bool = False) -> TableSpec:
    """Make a table of an object with the fields of EmbeddingBagConfig or EmbeddingConfig, whoever's."""
    if isinstance(config, TableSpec):
        return config
    missing = [name for name in ("num_embeddings", "embedding_dim", "name") if not hasattr(config, name)]
    kind = type(config).__name__
    require(not missing, f"expected a table configuration, got {kind}, which has no {', '.join(missing)}")
    return TableSpec(
        config.name,
        config.num_embeddings,
        config.embedding_dim,
        tuple(getattr(config, "feature_names", None) or ()),
        pooled=hasattr(config, "pooling") and getattr(config.pooling, "value", "") != "NONE",
        weighted=weighted,
        module=module,
        dtype=dtype_of(config.name, getattr(config, "data_type", "FP32")),
    )


def dtype_of(name: str, kind: Any) -> str:
    """Return our name of a torchrec DataType. Raises ConfigError for types that no table can have."""
    plain = str(getattr(kind, "name", kind)).lower().removeprefix("datatype.")
    require(plain in TABLE_DTYPES, f"table {name!r}: data_type is {kind!r}; use FP32, FP16 or BF16")
    return plain


def optimizer_name(name: Any) -> str:
    """Return our name for one of fbgemm ("exact_row_wise_adagrad"), a class, or the command line."""
    plain = re.sub("[_-]", "", str(name).lower()).removeprefix("exact")
    return next((known for known in STATE_FLOATS if known.replace("_", "") == plain), str(name))


def with_stats(spec: TableSpec, values: Mapping[str, Any]) -> TableSpec:
    """Return ``spec`` with what was recorded of the table. ``capacity_miss_ratio`` goes before
    ``unique_miss_ratio``, since rows never written are not read."""
    try:
        require(isinstance(values, Mapping), f"expected a mapping, got {values!r}")
        misses = values.get("capacity_miss_ratio")
        misses = values["unique_miss_ratio"] if misses is None else misses
        curve = MissCurve.through(values["sizes_rows"], misses, spec.rows)
        stats = TableStats(float(values["unique_rows"]), float(values["accesses"]), curve)
        possible = 0 < stats.unique_rows <= stats.accesses < math.inf
        require(possible, "unique_rows must be positive and at most accesses")
    except KeyError as error:
        raise ConfigError(f"stats of table {spec.name!r}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stats of table {spec.name!r}: {error}") from None
    return replace(spec, stats=stats)


def prepared(
    specs: Iterable[TableSpec],
    constraints: Mapping[str, ParameterConstraints],
    stats: Mapping[str, Mapping[str, Any]],
    world_size: int,
) -> list[TableSpec]:
    """Return ``specs`` with the numbers of constraints and stats. Raises ConfigError for doubled or unknown
    tables."""
    tables = list(specs)
    names = [spec.name for spec in tables]
    require(names, "there are no tables to plan")
    doubled = sorted(name for name, count in Counter(names).items() if count > 1)
    modules = sorted({spec.module for spec in tables if spec.name in doubled and spec.module})
    where = f" (in {', '.join(modules)})" if modules else ""
    once = "a plan goes by the names of tables, so give each its own"
    require(not doubled, f"tables {doubled} are there more than once{where}; {once}")
    for kind, mapping in (("constraints", constraints), ("stats", stats)):
        unknown = sorted(set(mapping) - set(names), key=str)
        require(not unknown, f"{kind} name unknown tables {unknown}; the tables are {names[:20]}")
    for name, demand in constraints.items():
        group = demand.device_group or [0]
        message = f"device_group {list(group)} must be ranks below {world_size}"
        require(max(group) < world_size, f"constraints of {name!r}: {message}")
    return [_prepared(t, constraints.get(t.name, ParameterConstraints()), stats.get(t.name)) for t in tables]


def _prepared(spec: TableSpec, demand: ParameterConstraints, stats: Mapping[str, Any] | None) -> TableSpec:
    factor = demand.pooling_factor
    spec = replace(
        spec,
        pooling_factor=spec.pooling_factor if factor is None else factor,
        weighted=spec.weighted or demand.is_weighted,
        optimizer=demand.optimizer or spec.optimizer,
        touched_rows=demand.touched_rows or spec.touched_rows,
    )
    return spec if stats is None else with_stats(spec, stats)
