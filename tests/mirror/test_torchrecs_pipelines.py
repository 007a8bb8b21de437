"""torchrec's own pipelines over our modules, in one process, train the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, TierConfig, optim
from tierstore import torchrec as mirror
from tierstore.sharding import construct_plan, row_wise, table_wise

CUTS = {"t0": row_wise(), "t1": table_wise(0), "t2": row_wise(), "t3": table_wise(0)}
STEPS = 12
LEAST = TierConfig(hbm="10KiB", ssd="64MiB", engine="memory")


@dataclass
class Batch(mirror.Pipelineable):
    features: Any

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)


class Model(nn.Module):
    """Pooled and single rows, and a layer that passes gradients to both."""

    def __init__(self, **place: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"optimizer": optim.Adagrad(lr=0.2), **place}
        self.sparse = tierstore.EmbeddingBagCollection(cases.tables(), **options)
        rows = [EmbeddingConfig(71, 6, "r0", feature_names=["d"])]
        self.rows = tierstore.EmbeddingCollection(rows, **options)
        self.over = nn.Linear(36, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        out = self.over(self.sparse(batch.features).values())
        loss = out.square().mean() + self.rows(batch.features)["d"].values().square().sum() / 100
        return loss, out.detach()

    def close(self) -> None:
        self.sparse.close()
        self.rows.close()


def batches(theirs: bool) -> Iterator[Batch]:
    """Batches of tierstore's jagged tensors, or of torchrec's."""
    for batch in cases.batches(1, STEPS):
        ours = batch.of([0])
        parts = {"values": ours.values(), "lengths": ours.lengths(), "stride": ours.stride()}
        yield Batch(mirror.KeyedJaggedTensor(ours.keys(), **parts) if theirs else ours)


def trained(model: nn.Module, pipeline: str, theirs: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state after training, and the outputs of all steps."""
    own = [p for name, p in model.named_parameters() if "over" in name]
    dense = torch.optim.SGD(own, lr=0.1)
    outputs: list[Tensor] = []
    if pipeline:
        kind = getattr(import_module("torchrec.distributed.train_pipeline"), pipeline)
        made, iterator = kind(model, dense, torch.device("cpu")), batches(theirs)
        outputs += [made.progress(iterator) for _ in range(STEPS)]
        with pytest.raises(StopIteration):
            made.progress(iterator)
    else:
        for batch in batches(theirs):
            dense.zero_grad()
            loss, out = model(batch)
            loss.backward()
            dense.step()
            outputs.append(out)
    return {key: value.clone() for key, value in model.state_dict().items()}, outputs


def check(found: Any, expected: Any) -> None:
    assert len(found[1]) == STEPS
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def pipelines() -> None:
    """Unsharded, and sharded on one rank. torchrec's pipelines need a process group."""
    parallel = import_module("tierstore.torchrec.distributed.model_parallel").DistributedModelParallel
    plain = Model(config=LEAST)
    expected = trained(plain, "")
    plain.close()
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist"):
        for theirs in (False, True):
            model = Model(config=LEAST)
            check(trained(model, name, theirs), expected)
            assert model.sparse.stats()["tiers"]["ssd"]["row_hits"] > 0, "rows must come back from the store"
            model.close()
            model = Model(device="meta")
            parts = [
                construct_plan(model.sparse, CUTS, 1, name="sparse"),
                construct_plan(model.rows, {"r0": row_wise()}, 1, name="rows"),
            ]
            plan = type(parts[0])(parts[0].tables + parts[1].tables, 1, 1, parts[0].device)
            with parallel(model, plan=plan, config=LEAST) as sharded:
                check(trained(sharded, name, theirs), expected)


def test_torchrecs_pipelines_train_the_bits_of_a_plain_loop() -> None:
    run(1, pipelines)
