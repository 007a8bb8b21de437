"""Accumulated passes of sharded collections: the bits of one batch of all passes on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, KeyedJaggedTensor, PoolingType, optim
from tierstore.errors import GradientError
from tierstore.sharding import (
    CommsConfig,
    DistributedModelParallel,
    ShardedCollection,
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    shard,
    table_wise,
)

PASSES, STEPS = 3, 2
OPTIMIZERS: list[Any] = [
    optim.Adam(lr=0.05),
    optim.Adagrad(lr=0.1),
    optim.RowWiseAdagrad(lr=0.1),
    {"t0": optim.SGD(lr=0.1, clip_grad_value=0.5), "*": optim.PartialRowWiseAdam(lr=0.05)},
]


def cuts_of(world: int) -> dict[str, dict[str, Any]]:
    last = world - 1
    names = ("t0", "t1", "t2", "t3")
    cuts = {
        "row-wise": [row_wise()] * 4,
        "table-wise": [table_wise(0), table_wise(last), table_wise(0), table_wise(last)],
        "column-wise": [column_wise([last, 0], [5, 1]), column_wise([0, last]), row_wise(), table_wise(0)],
        "replicas": [data_parallel(), row_wise(), data_parallel(), table_wise(last)],
        "one rank idle": [table_wise(last)] * 4,
    }
    return {name: dict(zip(names, chosen, strict=True)) for name, chosen in cuts.items()}


def configs_of(kind: str) -> list[Any]:
    pooled = cases.tables(PoolingType.SUM, PoolingType.MEAN)
    if kind == "pooled":
        return pooled
    return [
        EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names)
        for t in pooled
    ]


def sharded(configs: list[Any], cuts: dict[str, Any], optimizer: Any, **more: Any) -> ShardedCollection:
    options: dict[str, Any] = {"optimizer": optimizer, "seed": 3}
    if isinstance(configs[0], EmbeddingConfig):
        whole: Any = tierstore.EmbeddingCollection(configs, **options)
    else:
        whole = tierstore.EmbeddingBagCollection(configs, more.pop("weighted", False), **options)
    return shard(whole, construct_plan(whole, cuts, dist.get_world_size()), **more)


def folded(passes: Sequence[cases.Batch]) -> cases.Batch:
    """Return the batch of which each rank has its examples of all passes."""

    def joined(field: str) -> dict[str, list[Tensor]]:
        parts: list[dict[str, list[Tensor]]] = [getattr(one, field) for one in passes]
        return {
            name: [torch.cat([part[name][rank] for part in parts]) for rank in range(len(parts[0][name]))]
            for name in parts[0]
        }

    sizes = [sum(of_rank) for of_rank in zip(*(one.sizes for one in passes), strict=True)]
    return replace(
        passes[0], lengths=joined("lengths"), ids=joined("ids"), weights=joined("weights"), sizes=sizes
    )


def outputs(module: Any, features: KeyedJaggedTensor) -> list[Tensor]:
    found = module(features)
    return [one.values() for one in found.values()] if isinstance(found, dict) else [found.values()]


def targets_of(shapes: Sequence[torch.Size], seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return [torch.randn(shape, generator=random) for shape in shapes]


def everything(module: ShardedCollection) -> dict[str, Tensor]:
    found = {}
    for config in module.configs:
        ids = torch.arange(config.num_embeddings)
        found[config.name] = module.rows(ids, config.name)
        for name, state in module.optimizer_rows(ids, config.name).items():
            found[f"{config.name} {name}"] = state
    return found


def check_bits(one: ShardedCollection, other: ShardedCollection) -> None:
    expected = everything(other)
    for name, values in everything(one).items():
        assert torch.equal(values, expected[name]), name
    assert one.fused_optimizer.num_updates == other.fused_optimizer.num_updates == STEPS


def trains_alike(ours: Any, whole: Any, weighted: bool, data: list[cases.Batch]) -> None:
    rank = [dist.get_rank()]
    for step in range(STEPS):
        passes, targets = data[step * PASSES : (step + 1) * PASSES], []
        with tierstore.accumulate(ours) as rows:
            before = everything(ours)
            for number, batch in enumerate(passes):
                found = outputs(ours, batch.of(rank, weighted))
                targets.append(targets_of([one.shape for one in found], step * PASSES + number))
                torch.stack([(o * t).sum() for o, t in zip(found, targets[-1], strict=True)]).sum().backward()
            assert rows.kept_bytes or not ours.routing.own
            assert all(torch.equal(v, before[name]) for name, v in everything(ours).items())
        found = outputs(whole, folded(passes).of(rank, weighted))
        joined = [torch.cat(parts) for parts in zip(*targets, strict=True)]
        torch.stack([(o * t).sum() for o, t in zip(found, joined, strict=True)]).sum().backward()


def have_the_bits_of_one_batch(world: int, kind: str, weighted: bool = False) -> None:
    data = cases.batches(world, PASSES * STEPS, empty=world - 1)
    for cuts in cuts_of(world).values():
        for optimizer in OPTIMIZERS:
            options = {"weighted": weighted} if weighted else {}
            tiers = cases.MEMORY if isinstance(optimizer, dict) else cases.TIGHT
            ours, whole = (
                sharded(configs_of(kind), cuts, optimizer, config=config, **options)
                for config in (tiers, cases.MEMORY)
            )
            trains_alike(ours, whole, weighted, data)
            check_bits(ours, whole)
            ours.close()
            whole.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["pooled", "rows"])
def test_passes_have_the_bits_of_one_batch_on_the_same_ranks(world: int, kind: str) -> None:
    run(world, have_the_bits_of_one_batch, world, kind)


def test_weighted_passes_have_the_bits_of_one_batch() -> None:
    run(2, have_the_bits_of_one_batch, 2, "pooled", True)


def without_repeats_nearly_the_same() -> None:
    """Each pass adds up the gradients of its repeated ids before it sends them."""
    data = cases.batches(2, PASSES * STEPS)
    comms = CommsConfig(dedup=True)
    for kind in ("pooled", "rows"):
        ours, whole = (
            sharded(configs_of(kind), cuts_of(2)["row-wise"], optim.Adagrad(lr=0.1), comms=comms)
            for _ in range(2)
        )
        trains_alike(ours, whole, False, data)
        torch.testing.assert_close(everything(ours), everything(whole))
        ours.close()
        whole.close()


def test_ids_sent_once_are_added_by_pass() -> None:
    run(2, without_repeats_nearly_the_same)


# -- beside DDP --------------------------------------------------------------------------


class Scaled(nn.Module):
    """Its input's gradients have the same bits in every batch that an example may be in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, pooled: Tensor) -> Tensor:
        return (pooled * self.weight).square().sum()


def beside_ddp(optimizer: Any) -> None:
    rank, data = [dist.get_rank()], cases.batches(2, PASSES * STEPS)
    tables = [
        sharded(configs_of("pooled"), cuts_of(2)["column-wise"], optimizer, config=config)
        for config in (cases.TIGHT, cases.MEMORY)
    ]
    dense = [DistributedDataParallel(Scaled(36)) for _ in tables]
    steps = [torch.optim.SGD(one.parameters(), lr=0.01) for one in dense]
    for step in range(STEPS):
        passes = data[step * PASSES : (step + 1) * PASSES]
        for one in steps:
            one.zero_grad()
        with tierstore.accumulate(tables[0]):
            with dense[0].no_sync():
                for batch in passes[:-1]:
                    dense[0](tables[0](batch.of(rank)).values()).backward()
            dense[0](tables[0](passes[-1].of(rank)).values()).backward()
        dense[1](tables[1](folded(passes).of(rank)).values()).backward()
        for one in steps:
            one.step()
        if not step:  # later, the dense weights differ in the order in which DDP has added their gradients
            found, expected = map(everything, tables)
            assert all(torch.equal(values, expected[name]) for name, values in found.items())
    torch.testing.assert_close(everything(tables[0]), everything(tables[1]))
    torch.testing.assert_close(dense[0].module.weight, dense[1].module.weight)
    everyone = ShardingEnv.of(None).gather_objects(dense[0].module.weight.tolist())
    assert everyone[0] == everyone[1]
    for one in tables:
        one.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2], ids=lambda spec: spec.name)
def test_dense_parts_in_ddp_accumulate_by_no_sync(optimizer: Any) -> None:
    run(2, beside_ddp, optimizer)


# -- norms, scalers, errors --------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, config: Any = cases.MEMORY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = tierstore.EmbeddingBagCollection(
            cases.tables(), optimizer=optim.SGD(lr=0.1), config=config
        )
        self.top = nn.Linear(36, 1)

    def forward(self, features: Any) -> Tensor:
        return self.top(self.sparse(features).values()).square().sum()


def parallel(cuts: dict[str, Any], config: Any = cases.MEMORY) -> DistributedModelParallel:
    model = Model()
    plan = construct_plan(model.sparse, cuts, dist.get_world_size(), name="sparse")
    return DistributedModelParallel(model, plan=plan, config=config)


def norms_are_of_all_ranks(name: str) -> None:
    dmp, single, world = parallel(cuts_of(2)[name]), Model(), dist.get_world_size()
    (collection,) = dmp.sharded.values()
    limits = (1e-3, 1e6)
    for limit, batch in zip(limits, cases.batches(2, 2, grow=0), strict=True):
        for model in (dmp, single):
            model.zero_grad()
        with tierstore.accumulate(dmp) as ours, tierstore.accumulate(single) as theirs:
            dmp(batch.of([dist.get_rank()])).backward()
            (single(batch.of([0, 1])) / world).backward()
            found = nn.utils.clip_grad_norm_([*dmp.parameters(), *ours.parameters()], limit)
            expected = nn.utils.clip_grad_norm_([*single.parameters(), *theirs.parameters()], limit)
            torch.testing.assert_close(found, expected)
        for table in collection.table_names():
            ids = torch.arange(50)
            torch.testing.assert_close(collection.rows(ids, table), single.sparse.rows(ids, table))
    dmp.close()
    single.sparse.close()


@pytest.mark.parametrize("name", ["column-wise", "replicas", "one rank idle"])
def test_norms_are_of_the_rows_of_all_ranks(name: str) -> None:
    run(2, norms_are_of_all_ranks, name)


def scaler_steps() -> None:
    """One rank's loss overflows in the second step, which all ranks skip."""
    plain, scaled = (parallel(cuts_of(2)["replicas"]) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (ours,), (expected,) = scaled.sharded.values(), plain.sharded.values()
    expected.refuse_scaled = False  # its losses are not those of the scaler
    for step, batch in enumerate(cases.batches(2, 3, grow=0)):
        features = batch.of([dist.get_rank()])
        with tierstore.accumulate(scaled) as rows:
            factor = float("inf") if step == 1 and dist.get_rank() else 1.0
            scaler.scale(scaled(features) * factor).backward()
            scaler.step(rows)
            scaler.update()
        scaled.zero_grad()
        if step != 1:
            with tierstore.accumulate(plain):
                plain(features).backward()
            plain.zero_grad()
        assert scaler.get_scale() == (1024.0 if step < 1 else 512.0)
    assert ours.fused_optimizer.num_updates == expected.fused_optimizer.num_updates == 2
    found = everything(expected)
    assert all(torch.equal(values, found[name]) for name, values in everything(ours).items())
    plain.close()
    scaled.close()


def test_a_scaler_steps_the_rows_of_all_ranks_or_of_none() -> None:
    run(2, scaler_steps)


def wrong_gradients() -> None:
    dmp = parallel(cuts_of(2)["table-wise"], replace(cases.MEMORY, check_gradients=True))
    (batch,) = cases.batches(2, 1)
    with pytest.raises(GradientError, match="NaN"), tierstore.accumulate(dmp):
        (dmp(batch.of([dist.get_rank()])) * (float("nan") if dist.get_rank() else 1.0)).backward()
    dmp.zero_grad()
    with tierstore.accumulate(dmp):
        pass
    dmp(batch.of([dist.get_rank()])).backward()
    dmp.close()


def test_all_ranks_raise_for_a_gradient_of_one_rank() -> None:
    run(2, wrong_gradients)
