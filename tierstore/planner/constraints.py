"""What a user may demand of a table's placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.config import BOUNDS_CHECKS, check_bounds_check, is_integer, is_number, parse_bytes
from tierstore.placement import ShardingType
from tierstore.planner.checks import must_be, require

_ALL_TIERS = ("hbm", "uvm", "ssd")
_TIERS_OF_KERNELS = {
    **dict.fromkeys(("dense", "fused"), ("hbm",)),
    **dict.fromkeys(("fused_uvm", "fused_uvm_caching", "dram_virtual_table"), ("hbm", "uvm")),
    **dict.fromkeys(("key_value", "ssd_virtual_table"), _ALL_TIERS),
}
"""torchrec's compute kernels, and the tiers that may hold a table under each."""


@dataclass(frozen=True)
class ParameterConstraints:
    """Demands on one table; ``None`` leaves the choice to the planner. Names are torchrec's where
    it has them.

    - ``sharding_types``: allowed ones, as ShardingType or their values.
    - ``min_partition``: fewest columns of a shard.
    - ``device_group``: ranks that may hold the table.
    - ``min_hbm_bytes``, ``min_uvm_bytes``: of a tier that the whole table gets at least, as bytes or
      a string ("1GiB"). ``hbm_load_factor``: the share of its rows that "hbm" holds at least, 0 to 1.
    - ``tiers``: tiers that may hold it: "hbm" alone keeps every row on devices, "hbm" and "uvm" every row in
      memory; "ssd" with them (the default) allows all three. ``compute_kernels``: the same in torchrec's
      words ("fused", "fused_uvm_caching", "key_value" ..); of several the one with most tiers.
    - ``pooling_factor``, ``optimizer``: instead of the table's. ``pooling_factors``: one for each feature.
    - ``touched_rows``: rows that training will ever use; None: the table's own, or all.
    - ``is_weighted``: lookups have weights, even if the table's module does not say so.
    - ``stochastic_rounding``, ``bounds_check``: of the table, as in TableOverride.

    Raises ConfigError for values that are none of these.
    """

    sharding_types: Sequence[str] | None = None
    min_partition: int | None = None
    device_group: Sequence[int] | None = None
    min_hbm_bytes: int = 0
    min_uvm_bytes: int = 0
    tiers: Sequence[str] | None = None
    pooling_factor: float | None = None
    optimizer: str | None = None
    compute_kernels: Sequence[str] | None = None
    pooling_factors: Sequence[float] | None = None
    is_weighted: bool = False
    stochastic_rounding: bool | None = None
    hbm_load_factor: float = 0.0
    bounds_check: str | None = None
    touched_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("sharding_types", "device_group", "tiers", "compute_kernels", "pooling_factors"):
            value = getattr(self, name)
            listed = value is None or (isinstance(value, Sequence) and not isinstance(value, str))
            must_be(name, value, listed, "a list")
        if self.sharding_types is not None:
            kinds = _some_of("sharding_types", self.sharding_types, [kind.value for kind in ShardingType])
            object.__setattr__(self, "sharding_types", kinds)
        columns, group = self.min_partition, self.device_group
        must_be("min_partition", columns, columns is None or is_integer(columns, 1), "a positive integer")
        ranks = group is None or (len(group) and all(is_integer(rank) for rank in group))
        require(ranks, f"device_group {list(group or ())} must be ranks: integers from 0")
        for name in ("min_hbm_bytes", "min_uvm_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        share = self.hbm_load_factor
        must_be("hbm_load_factor", share, is_number(share) and 0 <= share <= 1, "a number from 0 to 1")
        must_be("is_weighted", self.is_weighted, isinstance(self.is_weighted, bool), "True or False")
        touched = self.touched_rows
        must_be("touched_rows", touched, touched is None or is_integer(touched, 1), "a positive integer")
        rounding = self.stochastic_rounding
        must_be("stochastic_rounding", rounding, rounding in (None, True, False), "True, False or None")
        if self.bounds_check is not None:
            check_bounds_check(self.bounds_check)
        self._set_tiers()
        self._set_pooling_factor()

    def _set_tiers(self) -> None:
        """Keep compute_kernels as tiers alone, so that dataclasses.replace may change them."""
        if self.compute_kernels is not None:
            names = _some_of("compute_kernels", self.compute_kernels, list(_TIERS_OF_KERNELS))
            tiers = max((_TIERS_OF_KERNELS[name] for name in names), key=len)
            require(
                self.tiers is None or set(self.tiers) == set(tiers),
                f"compute_kernels {list(names)} mean tiers {list(tiers)}, and tiers is {self.tiers}; "
                "give one of them",
            )
            object.__setattr__(self, "compute_kernels", None)
            object.__setattr__(self, "tiers", tiers)
        if self.tiers is not None:
            known = ({"hbm"}, {"hbm", "uvm"}, set(_ALL_TIERS))
            valid = all(isinstance(tier, str) for tier in self.tiers) and set(self.tiers) in known
            must_be("tiers", list(self.tiers), valid, '["hbm"], ["hbm", "uvm"] or all three')

    def _set_pooling_factor(self) -> None:
        factors = self.pooling_factors
        if factors is None:
            return
        numbers = all(isinstance(factor, int | float) and factor > 0 for factor in factors)
        require(
            len(factors) and numbers and self.pooling_factor is None,
            f"pooling_factors is {factors!r}; it must be positive numbers, one for each feature, and "
            "pooling_factor is left out then",
        )
        object.__setattr__(self, "pooling_factors", None)
        object.__setattr__(self, "pooling_factor", sum(factors) / len(factors))

    @property
    def stays_in_hbm(self) -> bool:
        """Whether every row of the table is in "hbm"."""
        return self.tiers is not None and set(self.tiers) == {"hbm"}

    @property
    def promises_memory(self) -> bool:
        """Whether the table must not share its slots of the memory tiers with others."""
        promised = self.min_hbm_bytes or self.min_uvm_bytes or self.hbm_load_factor
        return bool(promised or self.stays_in_memory)

    @property
    def stays_in_memory(self) -> bool:
        """Whether no row of the table is in the store."""
        return self.tiers is not None and "ssd" not in self.tiers


def _some_of(name: str, values: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
    """Return names, or values of enumerations, as a tuple; raise ConfigError unless they are known."""
    names = tuple(str(getattr(value, "value", value)) for value in values)
    require(names and set(names) <= set(known), f"{name} {list(names)} must be some of {list(known)}")
    return names


_THEIRS = ("sharding_types", "compute_kernels", "min_partition", "pooling_factors")
_OF_TIERS = ("is_weighted", "stochastic_rounding", "cache_params", "enforce_hbm", "bounds_check_mode")
_OF_NO_EFFECT = ("use_virtual_table",)  # every table is one: rows take space when they are touched
_OF_CACHE_INSTEAD = {
    "algorithm": 'tiers of all tables have one policy, TierConfig(policy="lru") or another',
    "reserved_memory": "budgets include what their slots need beside rows",
    "precision": "hbm holds the table's own dtype; TierConfig(uvm_dtype=, ssd_dtype=) is for lower tiers",
    "stats": "give the planner stats=, recorded miss-ratio curves",
}
_INSTEAD = {
    "num_poolings": "give pooling_factors, the ids per example",
    "batch_sizes": "give the planner the batch_size of all",
    "device_group": "use tierstore's ParameterConstraints(device_group=[...]), a list of ranks",
    "output_dtype": "outputs are float32; give DataType.FP32, or leave it out",
    "key_value_params": "use TierConfig(path=..., ssd=..., engine=...), which says where rows are stored",
    "feature_names": "those of the table's configuration are looked up; leave it out",
}
"""Fields of torchrec's ParameterConstraints that cannot be met, and what to do instead."""


def constraints_of(value: Any, table: str) -> ParameterConstraints:
    """Return ``value``, or what an object with the fields of torchrec's ParameterConstraints demands."""
    if isinstance(value, ParameterConstraints):
        return value
    whose, known = f"constraints of {table!r}", all(hasattr(value, name) for name in _THEIRS)
    require(known, f"{whose} are a {type(value).__name__}; give ParameterConstraints")
    for name, given in vars(value).items():
        met = not given or name in (*_THEIRS, *_OF_NO_EFFECT, *_OF_TIERS)
        met = met or (name == "output_dtype" and getattr(given, "name", "") == "FP32")
        why = _INSTEAD.get(name, "leave it out")
        require(met, f"{whose}: {name} of torchrec cannot be met: {why}")
    theirs: dict[str, Any] = {n: getattr(value, n, None) for n in (*_THEIRS, "stochastic_rounding")}
    theirs["hbm_load_factor"] = _load_factor(getattr(value, "cache_params", None), whose)
    theirs["bounds_check"] = bounds_check_of(getattr(value, "bounds_check_mode", None), whose)
    theirs["tiers"] = ("hbm",) if getattr(value, "enforce_hbm", None) else None
    return ParameterConstraints(**theirs, is_weighted=bool(getattr(value, "is_weighted", False)))


def bounds_check_of(mode: Any, whose: str) -> str | None:
    """Return our name of fbgemm's BoundsCheckMode; None for none. Raises ConfigError for NONE."""
    if mode is None:
        return None
    name = str(getattr(mode, "name", mode)).removeprefix("V2_").lower()
    message = f"{whose}: bounds_check_mode is {mode!r}; ids are always checked: use FATAL, WARNING or IGNORE"
    require(name in BOUNDS_CHECKS, message)
    return name


def _load_factor(cache: Any, whose: str) -> float:
    """Return the load factor of torchrec's CacheParams; raise ConfigError for parameters beside it."""
    for name, given in () if cache is None else vars(cache).items():
        met = given is None or name in ("load_factor", "prefetch_pipeline")
        why = _OF_CACHE_INSTEAD.get(name, "leave it out")
        require(met, f"{whose}: {name} of torchrec's CacheParams cannot be met: {why}")
    return getattr(cache, "load_factor", None) or 0.0
