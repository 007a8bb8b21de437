"""Trainings closed and built again: bit for bit those that were not, whichever rank holds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, EmbeddingConfig, TierConfig, optim
from tierstore.sharding import (
    CommsConfig,
    ShardedCollection,
    ShardingEnv,
    construct_plan,
    shard,
    table_wise,
)

KINDS = ["bags", "bags with dedup", "rows", "rows with dedup"]


def build(env: ShardingEnv, kind: str, holder: int, path: str | None) -> ShardedCollection:
    """All tables on rank ``holder``."""
    configs: list[Any] = cases.tables()
    if kind.startswith("rows"):
        names = ("num_embeddings", "embedding_dim", "name", "feature_names")
        configs = [EmbeddingConfig(**{name: getattr(c, name) for name in names}) for c in configs]
    collection = (
        tierstore.EmbeddingBagCollection
        if isinstance(configs[0], EmbeddingBagConfig)
        else tierstore.EmbeddingCollection
    )
    whole = collection(configs, config=cases.MEMORY, optimizer=optim.Adam(lr=0.1), seed=3)
    plan = construct_plan(whole, {config.name: table_wise(holder) for config in configs}, env.world_size)
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path) if path else cases.MEMORY
    return shard(whole, plan, env, config=tiers, comms=CommsConfig(dedup=kind.endswith("dedup")))


def train(collection: ShardedCollection, steps: range) -> None:
    for batch in cases.batches(2, 6)[steps.start : steps.stop]:
        found = collection(batch.of([collection.env.rank]))
        outputs = list(found.values()) if isinstance(found, dict) else [found]
        torch.cat([output.values().square().flatten() for output in outputs]).sum().backward()


def contents(collection: ShardedCollection) -> dict[str, torch.Tensor]:
    found = dict(collection.state_dict())
    for table in collection.configs:
        state = collection.optimizer_rows(torch.arange(table.num_embeddings), table.name)
        found |= {f"{table.name}.{name}": value for name, value in state.items()}
    return found


def resumes(path: str, kind: str, holder: int) -> None:
    env = ShardingEnv.from_process_group()
    never_closed = build(env, kind, holder, None)
    train(never_closed, range(6))
    for steps in (range(2), range(2, 3), range(3, 6)):
        collection = build(env, kind, holder, path)
        assert collection.committed_extra().get("step", 0) == steps.start
        assert collection.fused_optimizer.num_updates == steps.start
        train(collection, steps)
        assert collection.fused_optimizer.num_updates == steps.stop
        collection.commit({"step": steps.stop})
        if steps.stop < 6:
            collection.close()
    torch.testing.assert_close(contents(collection), contents(never_closed), rtol=0, atol=0)
    collection.close()
    never_closed.close()
    env.check_same({"number of updates": never_closed.fused_optimizer.num_updates})


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_the_same_though_a_rank_holds_nothing(
    tmp_path: Path, kind: str, holder: int
) -> None:
    run(2, resumes, str(tmp_path), kind, holder)
