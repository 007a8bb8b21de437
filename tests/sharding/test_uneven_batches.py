"""The trainer of ``tierstore train`` on ranks that share batches unevenly, and have none of an example."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from tests.sharding.ranks import run
from tierstore import TierConfig, optim
from tierstore.cli.ranks import ALONE, Ranks
from tierstore.cli.setup import open_trainer, table_configs
from tierstore.data import Batch, TableInfo
from tierstore.data.dataset import one_id_per_table
from tierstore.sharding import ShardingEnv, construct_plan, row_wise, table_wise

ARGS = argparse.Namespace(dim=4, seed=3, lr=0.1, batch_size=4, epochs=1, steps=None)
CUTS = {"a": row_wise(), "b": table_wise(1)}


class Uneven:
    """Batches of 4, 3 and 1 examples, and of 3 and 1 that are held out."""

    name, dense_dim, num_train, num_test = "uneven", 3, 8, 4
    tables = (TableInfo("a", 40), TableInfo("b", 30))

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        yield from (self._batch(size) for size in (4, 3, 1))

    def test(self, batch_size: int) -> Iterator[Batch]:
        yield from (self._batch(size) for size in (3, 1))

    def _batch(self, size: int) -> Batch:
        rng = np.random.default_rng(size)
        return one_id_per_table(
            self.tables, rng.random((size, 3)), rng.integers(0, 30, (2, size)), np.arange(size) % 2
        )


def trained(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Rows, dense parameters and figures after training."""
    data, plan, config = Uneven(), None, TierConfig(hbm="all")
    if ranks.sharded:
        plan = construct_plan(table_configs(data, ARGS.dim), CUTS, ranks.size)
    with open_trainer(ARGS, data, optim.SGD(lr=0.1), config, ranks, plan) as trainer:
        assert trainer.train(data)
        progress = trainer.progress()
        assert 0 < progress.auc < 1
        figures = [progress.loss, progress.examples, *trainer.evaluate(data)]
        found = {name: trainer.embeddings.rows(range(30), name) for name in ("a", "b")}
        state = {name: value for name, value in trainer.model.state_dict().items() if "arch" in name}
    return {**found, **{k: v.clone() for k, v in state.items()}, "figures": torch.tensor(figures)}


def as_one_process() -> None:
    env = ShardingEnv.of(None)
    torch.testing.assert_close(
        trained(Ranks(env.rank, env.world_size, env)), trained(ALONE), rtol=1e-5, atol=1e-6
    )


def test_two_ranks_train_as_one_process_with_the_whole_batch() -> None:
    run(2, as_one_process)
