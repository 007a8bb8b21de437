"""Demands on tables: in our words and in torchrec's, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.planner.machines import table, topology
from tierstore.errors import ConfigError
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints
from tierstore.planner.constraints import constraints_of


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
