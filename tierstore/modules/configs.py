"""Configurations of a collection's tables: torchrec's classes. No field of them is ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from functools import partial
from math import sqrt
from numbers import Integral
from typing import Any

import torch

from tierstore.errors import ConfigError
from tierstore.keys import MAX_ID


@unique
class PoolingType(Enum):
    """How the rows of a bag become one vector. MAX is not in torchrec; NONE: EmbeddingCollection only."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"
    MAX = "MAX"


@unique
class DataType(Enum):
    """torchrec's data types. Tables are FP32, FP16 or BF16; other types are refused."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value


TABLE_DTYPE_OF = {DataType.FP32: "fp32", DataType.FP16: "fp16", DataType.BF16: "bf16"}
"""The dtypes of tables by torchrec's names."""

_NOT_HONOURED = {
    "num_embeddings_post_pruning": "tables are not pruned; give num_embeddings the number of rows to use",
    "need_pos": "positions are not weighted by the table; pass weights in the KeyedJaggedTensor",
    "input_dim": "ids are not remapped; num_embeddings is the bound of the ids",
    "total_num_buckets": "rows are not divided into buckets",
    "virtual_table_eviction_policy": "rows are never dropped; TierConfig.policy says which tier they are in",
    "enable_embedding_update": "rows are written with load_rows()",
    "stash_weights": "the tiers hold the weights; TierConfig says where",
}


@dataclass
class BaseEmbeddingConfig:
    """One table of a collection. Field names, order and defaults are torchrec's.

    Args:
        num_embeddings: number of rows, up to 2**48; a row costs nothing before it is first updated.
        embedding_dim: floats per row, any number.
        name: of the table, unique in its collection.
        data_type: DataType.FP32, FP16 or BF16: of the weights in every tier; outputs are float32.
        feature_names: keys of the input that are looked up in this table; [name] if left out.
        weight_init_max, weight_init_min: bounds of uniform initial values; ±sqrt(1 / num_embeddings) if None.
        init_fn: initial values as a function of torch.nn.init: uniform_, normal_, constant_, zeros_ or ones_,
            or a functools.partial that fixes its arguments. Rows are made one by one, when they are touched,
            so other functions cannot be honoured.
        use_virtual_table: accepted, since every table is one: only touched rows take space.

    The other fields are torchrec's too, and refused (ConfigError) when they are set.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: object = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        _check_count(self, "num_embeddings", MAX_ID + 1)
        _check_count(self, "embedding_dim", None)
        if self.data_type not in TABLE_DTYPE_OF:
            raise self._error(
                f"data_type is {self.data_type!r}; tables that are trained have DataType.FP32, FP16 or BF16. "
                'Lower tiers may hold rows of FP32 tables in 8 bits: TierConfig(ssd_dtype="int8"); for '
                "inference, quantize a torchrec module that has the state_dict()"
            )
        for name, why in _NOT_HONOURED.items():
            if getattr(self, name):
                raise self._error(f"{name}={getattr(self, name)!r} is not supported: {why}")
        if isinstance(self.feature_names, str) or len(set(self.feature_names)) < len(self.feature_names):
            raise self._error(f"feature_names must be a list of different names, got {self.feature_names!r}")
        if not self.feature_names and self.name:
            self.feature_names = [self.name]
        if self.init_fn is not None and (self.weight_init_min, self.weight_init_max) != (None, None):
            raise self._error("give either init_fn or weight_init_min and weight_init_max, not both")
        self.init_rule()

    def get_weight_init_max(self) -> float:
        """Return the upper bound of uniform initial values."""
        return sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the lower bound of uniform initial values."""
        return -sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Return the number of input keys that are looked up in this table."""
        return len(self.feature_names)

    def init_rule(self) -> tuple[str, float, float]:
        """Return ("uniform", low, high), ("normal", mean, deviation) or ("constant", value, 0)."""
        if self.init_fn is None:
            low, high = self.get_weight_init_min(), self.get_weight_init_max()
            if low > high:
                raise self._error(f"weight_init_min {low} is above weight_init_max {high}; swap them")
            return "uniform", low, high
        rule = rule_of_init_fn(self.init_fn)
        if rule is None:
            raise self._error(
                f"init_fn {self.init_fn!r} cannot be honoured: rows are made one by one, when they are "
                "touched; use uniform_, normal_, constant_, zeros_ or ones_ of torch.nn.init (or a "
                "functools.partial that fixes their arguments), or write rows with load_rows()"
            )
        return rule

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"table {self.name!r}: {message}")


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose bags are pooled into one vector each."""

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.pooling, PoolingType) or self.pooling is PoolingType.NONE:
            raise self._error(
                f"pooling is {self.pooling!r}; use PoolingType.SUM, MEAN or MAX, or an EmbeddingCollection "
                "to get the rows themselves"
            )


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one by one."""


def from_torchrec(config: object) -> EmbeddingBagConfig | EmbeddingConfig:
    """Return the same table as a torchrec EmbeddingBagConfig or EmbeddingConfig, recognised by its fields.

    Raises ConfigError for what cannot be honoured, and for objects that are neither.
    """
    if isinstance(config, BaseEmbeddingConfig):
        return config  # type: ignore[return-value]
    names = [item.name for item in fields(BaseEmbeddingConfig)]
    missing = [name for name in ("num_embeddings", "embedding_dim", "name") if not hasattr(config, name)]
    if missing:
        raise ConfigError(
            f"expected an EmbeddingBagConfig or EmbeddingConfig, got {type(config).__name__}, which has no "
            f"{', '.join(missing)}"
        )
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    values["feature_names"] = list(values.get("feature_names") or [])
    if "data_type" in values:
        values["data_type"] = _same_member(DataType, values["data_type"])
    # torchrec fills init_fn in from the bounds, when it is not given
    low, high = values.get("weight_init_min"), values.get("weight_init_max")
    default = sqrt(1 / values["num_embeddings"])
    bounds = ("uniform", -default if low is None else low, default if high is None else high)
    if values.get("init_fn") is not None and rule_of_init_fn(values["init_fn"]) == bounds:
        values["init_fn"] = None
    if not hasattr(config, "pooling"):
        return EmbeddingConfig(**values)
    values["pooling"] = _same_member(PoolingType, config.pooling)
    return EmbeddingBagConfig(**values)


def rule_of_init_fn(init_fn: Callable[..., object]) -> tuple[str, float, float] | None:
    """Return the rule of an initialiser of torch.nn.init, or of a partial of one; None for other
    functions."""
    arguments: dict[str, Any] = {}
    if isinstance(init_fn, partial):
        if init_fn.args:
            return None
        arguments, init_fn = init_fn.keywords, init_fn.func
    rules: dict[Any, tuple[str, dict[str, float]]] = {
        torch.nn.init.uniform_: ("uniform", {"a": 0.0, "b": 1.0}),
        torch.nn.init.normal_: ("normal", {"mean": 0.0, "std": 1.0}),
        torch.nn.init.constant_: ("constant", {"val": 0.0}),
        torch.nn.init.zeros_: ("zeros", {}),
        torch.nn.init.ones_: ("ones", {}),
    }
    if init_fn not in rules:
        return None
    kind, defaults = rules[init_fn]
    if kind in ("zeros", "ones"):
        return None if arguments else ("constant", float(kind == "ones"), 0.0)
    if not arguments.keys() <= defaults.keys() or (kind == "constant" and not arguments):
        return None
    first, second = (*(defaults | arguments).values(), 0.0)[:2]
    return kind, float(first), float(second)


def _same_member(kind: type[Enum], value: object) -> object:
    """Return our enum's member for torchrec's; the config refuses values that the enum does not have."""
    name = getattr(value, "value", value)
    return kind(name) if name in {member.value for member in kind} else value


def _check_count(config: BaseEmbeddingConfig, name: str, maximum: int | None) -> None:
    value = getattr(config, name)
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < 1 or (maximum is not None and value > maximum):
        bounds = "a positive integer" if maximum is None else "an integer from 1 to 2**48"
        raise config._error(f"{name} is {value!r}; it must be {bounds}")
    setattr(config, name, int(value))
