"""DistributedModelParallel, pipelines and optimizers of the mirror, on two ranks, beside tierstore's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, KeyedJaggedTensor, TierConfig, optim
from tierstore import torchrec as mirror
from tierstore.sharding import construct_plan, row_wise, table_wise

CUTS = {"t0": row_wise(), "t1": table_wise(1), "t2": row_wise(), "t3": table_wise(0)}


@dataclass
class Batch(mirror.Pipelineable):
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)


class Model(nn.Module):
    def __init__(self, optimizer: Any = None, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(0)
        own: Any = {} if optimizer is None else {"optimizer": optimizer}
        self.sparse = mirror.EmbeddingBagCollection(cases.tables(), device=torch.device(device), **own)
        self.over = nn.Linear(36, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        out = self.over(self.sparse(batch.features).values())
        return out.square().mean(), out.detach()


def batches(rank: int, steps: int = 6) -> list[Batch]:
    return [Batch(batch.of([rank])) for batch in cases.batches(2, steps)]


def theirs(path: str, name: str) -> Any:
    from importlib import import_module

    return getattr(import_module(f"tierstore.torchrec.{path}"), name)


def dense_of(model: nn.Module, lr: float = 0.1) -> Any:
    keyed = theirs("optim.keyed", "KeyedOptimizerWrapper")
    chosen = theirs("optim.optimizers", "in_backward_optimizer_filter")
    return keyed(dict(chosen(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=lr))


def trained(
    model: Model, rank: int, pipeline: str = "", sharders: Any = None, **options: Any
) -> dict[str, Tensor]:
    parallel = theirs("distributed.model_parallel", "DistributedModelParallel")
    plan = construct_plan(model.sparse, CUTS, 2, name="sparse")
    with parallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders, config=cases.TIGHT) as dmp:
        combined = theirs("optim.keyed", "CombinedOptimizer")([dmp.fused_optimizer, dense_of(dmp)])
        if pipeline:
            module, _, name = pipeline.rpartition(".")
            made = getattr(__import__(module, fromlist=[name]), name)(
                dmp, combined, torch.device("cpu"), **options
            )
            iterator, outputs = iter(batches(rank)), 0
            while True:
                try:
                    outputs += len(made.progress(iterator)) > 0
                except StopIteration:
                    break
            assert outputs == (4 if options.get("execute_all_batches") is False else 6)
        else:
            for batch in batches(rank):
                combined.zero_grad()
                dmp(batch)[0].backward()
                combined.step()
        return {key: value.clone() for key, value in dmp.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


SPEC = optim.Adagrad(lr=0.2)
OURS = "tierstore.torchrec.distributed.train_pipeline"
THEIRS = "torchrec.distributed.train_pipeline"


def optimizers() -> None:
    rank = torch.distributed.get_rank()
    expected = trained(Model(SPEC), rank)
    applied = Model()
    _apply_optimizer_in_backward(torch.optim.Adagrad, applied.sparse.parameters(), {"lr": 0.2})
    same(trained(applied, rank), expected)
    on_cpu = Model(device="cpu")
    _apply_optimizer_in_backward(torch.optim.Adagrad, on_cpu.sparse.parameters(), {"lr": 0.2})
    same(trained(on_cpu, rank), expected)
    sharder = theirs("distributed.embeddingbag", "EmbeddingBagCollectionSharder")
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2, "eps": SPEC.eps}
    same(trained(Model(), rank, sharders=[sharder(fused)]), expected)
    both = Model()  # what was applied to a table comes before the sharder's
    _apply_optimizer_in_backward(torch.optim.Adagrad, both.sparse.parameters(), {"lr": 0.2})
    same(trained(both, rank, sharders=[sharder({"optimizer": EmbOptimType.ADAM})]), expected)
    opened = Model(device="cpu")
    opened.load_state_dict({**opened.state_dict()})
    assert not opened.sparse.engine.waits
    same(trained(opened, rank, sharders=[sharder(fused)]), expected)


def optimizers_by_table() -> None:
    rank = torch.distributed.get_rank()
    each = {"t0": SPEC, "t1": optim.SGD(lr=0.1), "*": optim.Adam(lr=0.05, eps=1e-8)}
    expected = trained(Model(each), rank)
    assert not torch.equal(expected["sparse.embedding_bags.t1.weight"], trained(Model(SPEC), rank)[
        "sparse.embedding_bags.t1.weight"
    ])  # fmt: skip
    applied = Model()
    kinds = [
        (torch.optim.Adagrad, {"lr": 0.2}), (torch.optim.SGD, {"lr": 0.1}),
        *[(torch.optim.Adam, {"lr": 0.05})] * 2,
    ]  # fmt: skip
    for parameter, (kind, options) in zip(applied.sparse.parameters(), kinds, strict=True):
        _apply_optimizer_in_backward(kind, [parameter], options)
    same(trained(applied, rank), expected)
    sharder = theirs("distributed.embeddingbag", "EmbeddingBagCollectionSharder")
    fused = {"optimizer": {**each, "*": EmbOptimType.ADAM}, "learning_rate": 0.05}
    same(trained(Model(), rank, sharders=[sharder(fused)]), expected)
    with pytest.raises(ConfigError, match=r"optimizer names tables \['nowhere'\]; there are"):
        trained(Model(), rank, sharders=[sharder({"optimizer": {"nowhere": SPEC}})])
    with pytest.raises(ConfigError, match=r"has no entry for tables \['t1', 't2', 't3'\]"):
        trained(Model(), rank, sharders=[sharder({"optimizer": {"t0": SPEC}})])


def test_optimizers_by_table() -> None:
    run(2, optimizers_by_table)


def test_every_way_to_choose_the_optimizer() -> None:
    run(2, optimizers)


def pipelines() -> None:
    rank = torch.distributed.get_rank()
    expected = trained(Model(SPEC), rank)
    for name in ("TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"):
        same(trained(Model(SPEC), rank, f"{OURS}.{name}"), expected)
    shorter = trained(Model(SPEC), rank, f"{OURS}.TrainPipelineSparseDist", execute_all_batches=False)
    assert not torch.equal(shorter["over.weight"], expected["over.weight"])
    for name in ("TrainPipelineSparseDist", "TrainPipelineBase"):
        same(trained(Model(SPEC), rank, f"{THEIRS}.{name}"), expected)


def test_pipelines_train_as_a_plain_loop_does() -> None:
    """Ours, and torchrec's own over our modules."""
    run(2, pipelines)


def surroundings() -> None:
    rank = torch.distributed.get_rank()
    parallel = theirs("distributed.model_parallel", "DistributedModelParallel")
    keyed = theirs("optim.keyed", "KeyedOptimizer")
    tierstore.set_default_config(TierConfig(hbm="2MiB", ssd="64MiB"))
    try:
        env = theirs("distributed.types", "ShardingEnv").from_process_group(torch.distributed.group.WORLD)
        model = Model(SPEC)
        model.over = nn.Linear(36, 1, device="meta")
        with parallel(model, env, torch.device("cpu"), init_data_parallel=False) as dmp:
            assert dmp._plan is dmp.plan
            assert {table.name for table in dmp.plan.tables} == {"t0", "t1", "t2", "t3"}
            assert dmp.plan.tables[0].shards[0].hbm_bytes > 0
            assert dmp.sharded["sparse"].tiers.hbm == 2 << 20
            assert isinstance(dmp.fused_optimizer, keyed)
            assert isinstance(dmp, theirs("optim.fused", "FusedOptimizerModule"))
            assert not any(parameter.is_meta for parameter in dmp.parameters())
            assert not isinstance(dmp._wrapped, nn.parallel.DistributedDataParallel)
            dmp.init_data_parallel()
            dmp.init_data_parallel()
            assert isinstance(dmp._wrapped, nn.parallel.DistributedDataParallel)
            sharded = theirs("distributed.embeddingbag", "ShardedEmbeddingBagCollection")
            assert isinstance(dmp.module.sparse, sharded)
            evaluation = theirs("distributed", "EvalPipelineSparseDist")(
                dmp, dmp.fused_optimizer, torch.device("cpu")
            )
            before = dmp.module.sparse.rows([1, 2], "t0")
            assert not evaluation.progress(iter(batches(rank, 2))).requires_grad
            evaluation.reset()
            assert torch.equal(dmp.module.sparse.rows([1, 2], "t0"), before)
        warm = theirs("optim", "WarmupOptimizer")
        policy, stage = theirs("optim.warmup", "WarmupPolicy"), theirs("optim", "WarmupStage")
        with parallel(Model(SPEC)) as dmp:
            optimizer = warm(dmp.fused_optimizer, [stage(policy.CONSTANT, 10, 0.5)], lr=0.2)
            optimizer.step()
            assert dmp.fused_optimizer.param_groups[0]["lr"] == 0.1
    finally:
        tierstore.set_default_config(None)


def test_what_scripts_find_around_the_model() -> None:
    run(2, surroundings)


def mistakes() -> None:
    parallel = theirs("distributed.model_parallel", "DistributedModelParallel")
    for options, said in (
        ({"model_tracker_configs": object()}, "use touched_ids"),
        ({"data_parallel_wrapper": object()}, "leave it out"),
        ({"sharders": [object()]}, "use the sharders of tierstore.torchrec"),
        ({"plan": object()}, "use a tierstore.sharding.ShardingPlan"),
    ):
        with pytest.raises(ConfigError, match=said):
            parallel(Model(SPEC), **options)
    with pytest.raises(ConfigError, match="no embedding collection"):
        parallel(nn.Linear(1, 1))
    strange = Model(SPEC)
    strange.own = nn.ParameterList([nn.Parameter(torch.empty(2, device="meta"))])
    with pytest.raises(ConfigError, match=r"own is a ParameterList on the meta device without"):
        parallel(strange)
    pipeline = theirs("distributed", "TrainPipelineSparseDist")
    for options, said in (({"apply_jit": True}, "apply_jit"), ({"context_type": object}, "context_type")):
        with pytest.raises(ConfigError, match=said):
            pipeline(nn.Linear(1, 1), None, torch.device("cpu"), **options)


def test_mistakes_are_named() -> None:
    run(2, mistakes)


def dedup_and_bounds() -> None:
    rank = torch.distributed.get_rank()
    rows = theirs("distributed.embedding", "EmbeddingCollectionSharder")
    bounds = theirs("distributed.types", "BoundsCheckMode")
    tables = [mirror.EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=20, feature_names=["a"])]
    parallel = theirs("distributed.model_parallel", "DistributedModelParallel")
    model = nn.ModuleDict({"rows": mirror.EmbeddingCollection(tables=tables, device=torch.device("meta"))})
    plan = construct_plan(model["rows"], {"t": row_wise()}, 2, name="rows")
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "bounds_check_mode": bounds.IGNORE}
    sharder = rows(fused, use_index_dedup=True)
    with parallel(model, plan=plan, sharders=[sharder], config=cases.TIGHT) as dmp:
        module = dmp.module["rows"]
        assert module.comms.dedup
        found = module(KeyedJaggedTensor(["a"], torch.tensor([rank, 99]), lengths=torch.tensor([1, 1])))
        expected = [module.rows([other, 0], "t") for other in (0, 1)][rank]
        assert torch.equal(found["a"].values(), expected)


def test_sharders_reach_the_exchange() -> None:
    run(2, dedup_and_bounds)
