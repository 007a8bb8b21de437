"""Demands on tables: in our words and in torchrec's, and what is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from torchrec.distributed import types
from torchrec.distributed.planner.types import ParameterConstraints as TheirConstraints
from torchrec.distributed.types import BoundsCheckMode
from torchrec.types import DataType

from tests.planner.machines import table, topology
from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints
from tierstore.planner.constraints import constraints_of
from tierstore.planner.tables import prepared


@pytest.mark.parametrize(
    ("kernels", "tiers"),
    [
        (["fused"], ("hbm",)),
        (["dense", "fused_uvm_caching"], ("hbm", "uvm")),
        (["fused", "key_value"], ("hbm", "uvm", "ssd")),
    ],
)
def test_compute_kernels_are_tiers_in_torchrecs_words(kernels, tiers):
    assert ParameterConstraints(compute_kernels=kernels).tiers == tiers
    assert ParameterConstraints(compute_kernels=kernels) == ParameterConstraints(tiers=tiers)


def theirs(**changes):
    """An object with the fields and defaults of torchrec 1.8.0's ParameterConstraints."""
    fields = dict.fromkeys(
        ("sharding_types", "compute_kernels", "min_partition", "num_poolings", "batch_sizes", "enforce_hbm")
    )
    return SimpleNamespace(**{**fields, "pooling_factors": [1.0], "is_weighted": False, **changes})


def test_torchrecs_own_constraints_are_taken():
    demand = constraints_of(theirs(sharding_types=["row_wise"], compute_kernels=["fused"]), "t")
    assert (demand.sharding_types, demand.tiers) == (("row_wise",), ("hbm",))
    assert constraints_of(theirs(pooling_factors=[2.0, 4.0]), "t").pooling_factor == 3
    planner = EmbeddingShardingPlanner(topology(), {"t": theirs(sharding_types=["column_wise"])})
    assert planner.plan([table(rows=1000)]).table("t").sharding_type == "column_wise"
    with pytest.raises(ConfigError, match="constraints of 't': batch_sizes of torchrec"):
        constraints_of(theirs(batch_sizes=[3]), "t")


@pytest.mark.parametrize("optimizer", ["lars_sgd", "lamb", "partial_rowwise_lamb"])
def test_tables_whose_updates_need_whole_rows_are_not_cut_by_columns(optimizer):
    wide = table(rows=1000, dim=1024, optimizer=optimizer)
    by_columns = {"t": ParameterConstraints(sharding_types=["column_wise"])}
    with pytest.raises(ConfigError, match=f"no sharding type.*{optimizer} needs whole rows"):
        EmbeddingShardingPlanner(topology(), by_columns).plan([wide])
    either = {"t": ParameterConstraints(sharding_types=["column_wise", "row_wise"])}
    plan = EmbeddingShardingPlanner(topology(), either).plan([wide])
    assert plan.table("t").sharding_type == "row_wise"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharding_types": "row_wise"}, "sharding_types is 'row_wise'; it must be a list"),
        ({"tiers": [["hbm"]]}, "tiers is"),
        ({"tiers": ["hbm"], "compute_kernels": ["key_value"]}, "give one of them"),
        ({"compute_kernels": ["quick"]}, "must be some of .'dense'"),
        ({"compute_kernels": []}, "must be some of"),
        ({"device_group": []}, "must be ranks"),
        ({"device_group": [-1]}, "must be ranks"),
        ({"device_group": ["0"]}, "must be ranks"),
        ({"device_group": [0.5]}, "must be ranks"),
        ({"device_group": [True]}, "must be ranks"),
        ({"min_partition": True}, "min_partition is True"),
        ({"pooling_factors": [1.0, -1.0]}, "pooling_factors"),
        ({"pooling_factors": [2.0], "pooling_factor": 2.0}, "pooling_factor is left out"),
    ],
)
def test_what_is_no_demand_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ParameterConstraints(**fields)


@pytest.mark.parametrize("value", [3, {"sharding_types": ["row_wise"]}, None])
def test_constraints_that_are_none_name_the_table(value):
    with pytest.raises(ConfigError, match="constraints of 't' are a"):
        EmbeddingShardingPlanner(topology(), {"t": value})


GIVEN = {
    "sharding_types": ["row_wise"],
    "compute_kernels": ["fused"],
    "min_partition": 4,
    "pooling_factors": [3.0],
    "is_weighted": True,
    "use_virtual_table": True,
    "num_poolings": [2.0],
    "batch_sizes": [3],
    "cache_params": types.CacheParams(load_factor=0.5),
    "enforce_hbm": True,
    "stochastic_rounding": True,
    "bounds_check_mode": BoundsCheckMode.WARNING,
    "feature_names": ["f"],
    "output_dtype": DataType.FP16,
    "device_group": "cuda",
    "key_value_params": types.KeyValueParams(ssd_storage_directory="/ssd"),
}
HONOURED = (
    *("sharding_types", "compute_kernels", "min_partition", "pooling_factors"),
    *("is_weighted", "stochastic_rounding", "cache_params", "enforce_hbm", "bounds_check_mode"),
)


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(TheirConstraints)])
def test_every_field_of_torchrecs_is_met_or_named(name):
    """One that torchrec adds later needs a value here, and is refused until it is met."""
    plain = constraints_of(TheirConstraints(), "t")
    value = TheirConstraints(**{name: GIVEN[name]})
    if name in HONOURED:
        assert constraints_of(value, "t") != plain
    elif name == "use_virtual_table":
        assert constraints_of(value, "t") == plain
    else:
        with pytest.raises(ConfigError, match=rf"constraints of 't': {name} of torchrec .*(use|give|leave)"):
            constraints_of(value, "t")


def test_a_load_factor_is_a_floor_of_hbm():
    rows = [table("t", rows=200_000), table("u", rows=200_000)]
    small = topology(1, 1, hbm_per_rank="96MiB")

    def in_hbm(**changes):
        (shard,) = EmbeddingShardingPlanner(small, {"t": theirs(**changes)}).plan(rows).table("t").shards
        return shard.hbm_rows / 200_000, shard.own

    assert in_hbm()[0] < 0.85
    share, own = in_hbm(cache_params=types.CacheParams(load_factor=0.85))
    assert own
    assert 0.85 <= share < 0.95
    with pytest.raises(ConfigError, match=r"hbm_load_factor is .*; it must be a number from 0 to 1"):
        ParameterConstraints(hbm_load_factor=1.5)


def test_enforced_hbm_keeps_every_row_there():
    rows = [table("t", rows=200_000), table("u", rows=200_000)]
    small = topology(1, 1, hbm_per_rank="96MiB")
    plan = EmbeddingShardingPlanner(small, {"t": theirs(enforce_hbm=True)}).plan(rows)
    assert plan.table("t").shards[0].hbm_rows == 200_000
    assert plan.table("u").shards[0].hbm_rows < 200_000
    assert constraints_of(theirs(enforce_hbm=False), "t").tiers is None
    with pytest.raises(ConfigError, match="give one of them"):
        constraints_of(theirs(enforce_hbm=True, compute_kernels=["key_value"]), "t")


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": types.CacheAlgorithm.LRU},
        {"reserved_memory": 1.0},
        {"precision": DataType.FP16},
        {"stats": ...},
        {"multipass_prefetch_config": types.MultiPassPrefetchConfig()},
    ],
    ids=str,
)
def test_cache_parameters_that_tiers_cannot_meet(changes):
    (name,) = changes
    with pytest.raises(
        ConfigError, match=rf"constraints of 't': {name} of torchrec's CacheParams cannot be met"
    ):
        constraints_of(theirs(cache_params=types.CacheParams(**changes)), "t")
    assert constraints_of(theirs(cache_params=types.CacheParams(prefetch_pipeline=True)), "t")


@pytest.mark.parametrize(
    ("mode", "name"),
    [("FATAL", "fatal"), ("WARNING", "warning"), ("IGNORE", "ignore"), ("V2_IGNORE", "ignore")],
)
def test_the_bounds_check_is_part_of_the_plan(mode, name):
    demand = theirs(bounds_check_mode=BoundsCheckMode[mode])
    rows = [table("t", rows=1000), table("u", rows=1000)]
    plan = EmbeddingShardingPlanner(topology(), {"t": demand}).plan(rows)
    assert [one.bounds_check for one in plan.tables] == [name, None]
    assert ShardingPlan.from_dict(plan.to_dict()).tables == plan.tables
    with pytest.raises(ConfigError, match="ids are always checked: use FATAL, WARNING or IGNORE"):
        constraints_of(theirs(bounds_check_mode=BoundsCheckMode.NONE), "t")


def test_what_a_later_torchrec_may_add_is_not_dropped():
    with pytest.raises(ConfigError, match="constraints of 't': new_field of torchrec cannot be met: leave"):
        constraints_of(theirs(new_field=3), "t")
    assert constraints_of(theirs(bounds_check_mode=BoundsCheckMode.FATAL, output_dtype=DataType.FP32), "t")


def test_weights_that_only_the_constraints_tell_of():
    rows = [table(rows=1000)]
    plain, weighted = (
        EmbeddingShardingPlanner(topology(), {"t": theirs(is_weighted=flag)}) for flag in (False, True)
    )
    (spec,) = prepared(rows, weighted.constraints, {}, 2)
    assert spec.weighted
    assert not prepared(rows, plain.constraints, {}, 2)[0].weighted
