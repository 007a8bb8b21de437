"""Topologies, reservations, sharders and constraints of the mirror: each changes the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import tierstore
from tierstore import ConfigError, TierConfig, optim
from tierstore import torchrec as mirror
from tierstore.errors import InfeasiblePlanError
from tierstore.placement import ShardingPlan, ShardingType
from tierstore.torchrec.distributed.embedding import EmbeddingCollectionSharder
from tierstore.torchrec.distributed.embedding_types import EmbeddingComputeKernel
from tierstore.torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tierstore.torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from tierstore.torchrec.distributed.model_parallel import get_default_sharders
from tierstore.torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tierstore.torchrec.distributed.planner import storage_reservations as reservations
from tierstore.torchrec.distributed.planner.types import StorageReservation
from tierstore.torchrec.distributed.types import BoundsCheckMode, CacheParams, ModuleSharder, ShardingPlanner
from tierstore.torchrec.fused_params import FusedParams

MIB = 1 << 20
ROWS = 100_000


@pytest.fixture(autouse=True)
def tiers() -> Iterator[None]:
    tierstore.set_default_config(TierConfig(hbm="16MiB", uvm="8MiB", ssd="4GiB"))
    yield
    tierstore.set_default_config(None)


def model(dense: int = 8) -> nn.Module:
    tables = [
        mirror.EmbeddingBagConfig(name=name, embedding_dim=64, num_embeddings=ROWS, feature_names=[name])
        for name in ("t", "u")
    ]
    bags = mirror.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    return nn.ModuleDict({"bags": bags, "dense": nn.Linear(dense, 1)})


def topology(**changes: Any) -> Topology:
    return Topology(**{"world_size": 2, "compute_device": "cpu", "local_world_size": 2, **changes})


def plan(sharders: Any = None, on: Topology | None = None, **options: Any) -> ShardingPlan:
    options = {"batch_size": 32, **options}
    return EmbeddingShardingPlanner(topology=on or topology(), **options).plan(model(), sharders)


def tier_bytes(found: ShardingPlan, tier: str) -> int:
    return sum(getattr(shard, f"{tier}_bytes") for table in found.tables for shard in table.shards)


def hbm_of(found: ShardingPlan, table: str) -> int:
    return sum(shard.hbm_rows for shard in found.table(table).shards)


def test_a_plan_is_of_the_budgets_of_the_default_configuration() -> None:
    found = plan()
    assert found.world_size == found.ranks_per_host == 2
    assert list(found.plan) == ["bags"]
    assert sorted(found.plan["bags"]) == ["t", "u"]
    assert 24 * MIB < tier_bytes(found, "hbm") <= 33 * MIB
    tierstore.set_default_config(TierConfig(hbm="2MiB", uvm="1MiB", ssd="4GiB"))
    assert tier_bytes(plan(), "hbm") <= 5 * MIB


def test_caps_of_the_topology_come_first() -> None:
    base = plan()
    small = plan(on=topology(hbm_cap=4 * MIB))
    assert tier_bytes(small, "hbm") <= 9 * MIB < tier_bytes(base, "hbm")
    assert tier_bytes(plan(on=topology(ddr_cap=0)), "uvm") < tier_bytes(base, "uvm")
    with pytest.raises(InfeasiblePlanError):
        plan(on=topology(hbm_cap=4 * MIB, ddr_cap=MIB, ssd_cap=0))
    assert plan(on=topology(world_size=4, local_world_size=2)).ranks_per_host == 2
    on_gpus = plan(on=topology(compute_device="cuda", hbm_cap=64 * MIB))
    assert on_gpus.device == "cuda"


def test_rates_reach_the_planner() -> None:
    fast = topology(compute_device="cuda", hbm_cap=64 * MIB, hbm_to_ddr_mem_bw=32e9 / 1000, intra_host_bw=1e9)
    assert fast.rates == {"host_link_bw": 32e9, "intra_host_bw": 1e12}
    report = plan(on=fast).report
    assert "host_link_bw" not in report["assumed_rates"]
    assert topology(ddr_mem_bw=1e6, hbm_mem_bw=5.0).rates == {"hbm_bw": 1e9}


@pytest.mark.parametrize(
    "changes",
    [
        {"pod_size": 2},
        {"custom_topology_data": ...},
        {"uneven_sharding_perf_multiplier": 2.0},
        {"generalized_comms_bandwidths": ...},
        {"compute_device": "mtia"},
        {"local_world_size": 3, "world_size": 4},
    ],
    ids=str,
)
def test_topologies_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Topology: "):
        topology(**changes)


RESERVATIONS: list[Callable[[], Any]] = [
    lambda: reservations.HeuristicalStorageReservation(percentage=0.5),
    lambda: reservations.FixedPercentageStorageReservation(0.5),
    lambda: reservations.FixedAbsoluteStorageReservation(8 * MIB),
][: 2 if torchrec.__version__ == "1.6.1" else 3]  # which has no third one


@pytest.mark.parametrize("make", RESERVATIONS)
@pytest.mark.filterwarnings("error")
def test_what_is_reserved_is_not_for_rows(make: Callable[[], Any]) -> None:
    assert isinstance(make(), StorageReservation)
    half = plan(storage_reservation=make())
    assert tier_bytes(half, "hbm") <= 17 * MIB < tier_bytes(plan(), "hbm")
    with pytest.raises(ConfigError, match="leaves nothing of"):
        plan(storage_reservation=reservations.FixedPercentageStorageReservation(1.0))
    with pytest.raises(ConfigError, match="storage_reservation is a InferenceStorageReservation"):
        plan(storage_reservation=reservations.InferenceStorageReservation(0.1))


def test_dense_parameters_on_a_gpu_are_reserved() -> None:
    on = topology(compute_device="cuda", hbm_cap=16 * MIB)
    base = plan(on=on, storage_reservation=reservations.HeuristicalStorageReservation(0.0))
    told = reservations.HeuristicalStorageReservation(0.0, dense_tensor_estimate=8 * MIB)
    assert tier_bytes(plan(on=on, storage_reservation=told), "hbm") < tier_bytes(base, "hbm") - 12 * MIB


@pytest.mark.parametrize(
    ("constraint", "holds"),
    [
        ({"sharding_types": ["row_wise"]}, lambda p: p.table("t").sharding_type is ShardingType.ROW_WISE),
        (
            {"sharding_types": ["column_wise"]},
            lambda p: p.table("t").sharding_type is ShardingType.COLUMN_WISE,
        ),
        ({"pooling_factors": [60.0]}, lambda p: hbm_of(p, "t") < hbm_of(p, "u")),  # ids take memory
        ({"is_weighted": True}, lambda p: hbm_of(p, "t") < hbm_of(p, "u")),
        ({"cache_params": CacheParams(load_factor=0.9)}, lambda p: hbm_of(p, "t") >= 0.9 * ROWS),
        ({"enforce_hbm": True}, lambda p: hbm_of(p, "t") == ROWS),
        ({"compute_kernels": [EmbeddingComputeKernel.FUSED.value]}, lambda p: hbm_of(p, "t") == ROWS),
        ({"stochastic_rounding": True}, lambda p: p.table("t").stochastic_rounding is True),
        ({"bounds_check_mode": BoundsCheckMode.WARNING}, lambda p: p.table("t").bounds_check == "warning"),
    ],
)
def test_every_constraint_changes_the_plan(
    constraint: dict[str, Any], holds: Callable[[ShardingPlan], bool]
) -> None:
    wide = topology(hbm_cap=18 * MIB)
    free = plan(on=wide, constraints={"u": ParameterConstraints(sharding_types=["table_wise"])})
    bound = plan(
        on=wide,
        constraints={
            "t": ParameterConstraints(**constraint),
            "u": ParameterConstraints(sharding_types=["table_wise"]),
        },
    )
    assert holds(bound)
    assert bound != free


def test_columns_of_a_shard_are_at_least_the_smallest_partition() -> None:
    def columns(**more: Any) -> list[int]:
        demand = ParameterConstraints(sharding_types=["column_wise"], **more)
        return [shard.columns for shard in plan(constraints={"t": demand}).table("t").shards]

    assert columns() == columns(min_partition=32) == [32, 32]
    with pytest.raises(ConfigError, match="64 columns of which a shard has 33"):
        columns(min_partition=33)


@pytest.mark.parametrize("kind", ShardingType, ids=str)
def test_every_sharding_type_of_a_script_runs_on_one_rank(kind: ShardingType) -> None:
    demand = ParameterConstraints(sharding_types=[kind.value])
    found = plan(on=Topology(1, "cpu", hbm_cap=64 * MIB, ddr_cap=0), constraints={"t": demand})
    assert found.table("t").sharding_type is kind
    assert [(shard.rows, shard.columns) for shard in found.table("t").shards] == [(ROWS, 64)]


def test_unknown_tables_in_constraints() -> None:
    with pytest.raises(ConfigError, match="unknown tables"):
        plan(constraints={"nothing": ParameterConstraints()})


class RowWiseOnly(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


class InFastMemory(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


def test_sharders_of_a_script_restrict_the_plan() -> None:
    assert all(t.sharding_type is ShardingType.ROW_WISE for t in plan([RowWiseOnly()]).tables)
    with pytest.raises(ConfigError, match="allow a sharding type in both"):
        plan([RowWiseOnly()], constraints={"t": ParameterConstraints(sharding_types=["table_wise"])})
    wide = topology(hbm_cap=64 * MIB)
    assert all(hbm_of(plan([InFastMemory()], wide), name) == ROWS for name in ("t", "u"))
    with pytest.raises(InfeasiblePlanError):
        plan([InFastMemory()], topology(hbm_cap=4 * MIB))


@pytest.mark.parametrize(
    ("params", "holds"),
    [
        ({"cache_load_factor": 0.3}, lambda p: hbm_of(p, "t") >= 0.3 * ROWS and hbm_of(p, "u") >= 0.3 * ROWS),
        ({"enforce_hbm": True}, lambda p: hbm_of(p, "t") == hbm_of(p, "u") == ROWS),
        ({"stochastic_rounding": False}, lambda p: p.table("u").stochastic_rounding is False),
        ({"bounds_check_mode": BoundsCheckMode.IGNORE}, lambda p: p.table("u").bounds_check == "ignore"),
    ],
)
def test_fused_params_are_demands_on_every_table(params: Any, holds: Callable[[ShardingPlan], bool]) -> None:
    assert holds(plan([EmbeddingBagCollectionSharder(params)], topology(hbm_cap=64 * MIB)))
    other = plan([EmbeddingCollectionSharder(params)])
    assert other.table("t").bounds_check is None
    assert other.table("t").stochastic_rounding is None


def test_a_constraint_of_a_table_precedes_its_sharder() -> None:
    own = {"t": ParameterConstraints(bounds_check_mode=BoundsCheckMode.FATAL, stochastic_rounding=True)}
    params = {"bounds_check_mode": BoundsCheckMode.IGNORE, "stochastic_rounding": False}
    found = plan([EmbeddingBagCollectionSharder(params)], constraints=own)
    assert [t.bounds_check for t in found.tables] == ["fatal", "ignore"]
    assert [t.stochastic_rounding for t in found.tables] == [True, False]


def test_the_state_of_an_applied_optimizer_is_planned_for() -> None:
    built = model()
    _apply_optimizer_in_backward(torch.optim.Adam, built["bags"].parameters(), {"lr": 0.1})
    found = EmbeddingShardingPlanner(topology=topology(), batch_size=32).plan(built, get_default_sharders())
    assert hbm_of(found, "t") + hbm_of(found, "u") < 0.5 * (hbm_of(plan(), "t") + hbm_of(plan(), "u"))
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    assert plan([EmbeddingBagCollectionSharder(fused)]) == found


OPTIMIZERS: list[tuple[dict[str, Any], optim.OptimizerSpec]] = [
    ({"optimizer": EmbOptimType.EXACT_SGD}, optim.SGD(lr=0.01)),
    ({"optimizer": EmbOptimType.SGD, "learning_rate": 0.5}, optim.SGD(lr=0.5)),
    ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 0.1}, optim.Adagrad(lr=0.01, eps=0.1)),
    ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, optim.RowWiseAdagrad(lr=0.01, eps=1e-8)),
    ({"optimizer": EmbOptimType.ADAM, "beta1": 0.5}, optim.Adam(lr=0.01, eps=1e-8, betas=(0.5, 0.999))),
    (
        {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1},
        optim.AdamW(lr=0.01, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.1),
    ),
    (
        {"optimizer": EmbOptimType.EXACT_SGD, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        optim.SGD(lr=0.01, weight_decay=0.1, weight_decay_mode="l2"),
    ),
    (
        {
            "optimizer": EmbOptimType.EXACT_SGD,
            "weight_decay": 0.1,
            "weight_decay_mode": WeightDecayMode.DECOUPLE,
        },
        optim.SGD(lr=0.01, weight_decay=0.1, weight_decay_mode="decoupled"),
    ),
    ({"optimizer": EmbOptimType.LAMB, "beta2": 0.5, "eps": 0.1}, optim.LAMB(betas=(0.9, 0.5), eps=0.1)),
    ({"optimizer": EmbOptimType.LARS_SGD, "eta": 0.1}, optim.LarsSGD(lr=0.01, momentum=0.9, eta=0.1)),
    (
        {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "weight_decay": 0.1},
        optim.PartialRowWiseAdam(weight_decay=0.1),
    ),
    ({"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB}, optim.PartialRowWiseLAMB()),
]


@pytest.mark.parametrize(("params", "spec"), OPTIMIZERS, ids=str)
def test_fbgemms_optimizers_are_ours(params: dict[str, Any], spec: optim.OptimizerSpec) -> None:
    assert EmbeddingBagCollectionSharder(params).settings == FusedParams(spec)
    assert EmbeddingBagCollectionSharder(params).fused_params == params


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"optimizer": EmbOptimType.SHAMPOO}, "there is no fused shampoo"),
        ({"learning_rate": 0.1}, "learning_rate and no optimizer"),
        ({"optimizer": EmbOptimType.SGD, "momentum": 0.9}, "momentum without effect in fbgemm's sgd"),
        ({"max_gradient": 1.0}, "max_gradient has no counterpart in tiers"),
        (
            {"optimizer": EmbOptimType.SGD, "weight_decay": 0.1},
            "no effect in fbgemm without a weight_decay_mode",
        ),
        ({"output_dtype": "FP16"}, "outputs are float32"),
        ({"bounds_check_mode": BoundsCheckMode.NONE}, "ids are always checked"),
        ({"optimizer": EmbOptimType.SGD, "weight_decay_mode": "HALF"}, "weight_decay_mode is 'HALF'"),
    ],
)
def test_fused_params_that_tiers_cannot_honour(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EmbeddingBagCollectionSharder(fused_params=params)


def test_sharders_are_torchrecs_to_isinstance() -> None:
    for sharder in get_default_sharders():
        assert isinstance(sharder, ModuleSharder)
        with pytest.raises(ConfigError, match="give it to DistributedModelParallel"):
            sharder.shard(model()["bags"], {}, None)
    kinds = {sharder.module_type for sharder in get_default_sharders()}
    assert kinds == {mirror.EmbeddingBagCollection, mirror.EmbeddingCollection}
    built = model()["bags"]
    named = EmbeddingBagCollectionSharder().shardable_parameters(built)
    assert [*named] == ["t", "u"]
    assert isinstance(EmbeddingShardingPlanner(topology()), ShardingPlanner)
    with pytest.raises(ConfigError, match="use the sharders of"):
        plan([object()])


@pytest.mark.parametrize(
    "name",
    ["enumerator", "proposer", "partitioner", "performance_model", "stats", "callbacks", "plan_loader"],
)
def test_parts_of_torchrecs_planner_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is part of torchrec's planner"):
        EmbeddingShardingPlanner(topology(), **{name: object()})


def test_a_planner_without_ranks() -> None:
    with pytest.raises(ConfigError, match="give topology=Topology"):
        EmbeddingShardingPlanner().plan(model())
    with pytest.raises(ConfigError, match="no collection in tiers"):
        EmbeddingShardingPlanner(topology()).plan(nn.Linear(1, 1))
    import torchrec

    theirs = torchrec.distributed.planner.Topology(world_size=2, compute_device="cpu")
    with pytest.raises(ConfigError, match="make it with that"):
        EmbeddingShardingPlanner(theirs)


def test_exchanges_in_16_bits() -> None:
    half = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=get_qcomm_codecs_registry(half))
    assert sharder.comms is not None
    assert (sharder.comms.forward_precision, sharder.comms.backward_precision) == ("fp16", "bf16")
    assert get_qcomm_codecs_registry(QCommsConfig()) is None
    for wrong, said in (
        (QCommsConfig(forward_precision=CommType.INT8), "forward_precision is int8"),
        (QCommsConfig(backward_precision=CommType.FP8), "backward_precision is fp8"),
        (QCommsConfig(forward_precision=CommType.FP16, forward_loss_scale=2.0), "forward_loss_scale is 2.0"),
    ):
        with pytest.raises(ConfigError, match=said):
            get_qcomm_codecs_registry(wrong)
    with pytest.raises(ConfigError, match="use that function"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry={"POOLED_EMBEDDINGS_ALL_TO_ALL": object()})
