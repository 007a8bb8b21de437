"""Makes the parts of ``tierstore train`` from its options: tier budgets, data set, model, dense optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import tierstore
from tierstore import data, models
from tierstore.cache.machine import check_machine, check_memory
from tierstore.cache.shares import budget, named_as_options
from tierstore.cache.tiers.sizes import AnyPolicy, as_policy
from tierstore.cli.checkpoint import store_of
from tierstore.cli.ranks import ALONE, Ranks
from tierstore.cli.trainer import Schedule, Trainer
from tierstore.config import TierConfig
from tierstore.data import Dataset
from tierstore.errors import ConfigError
from tierstore.optim import OptimizerSpec
from tierstore.placement import ShardingPlan

_MOMENTUM_SGD = partial(torch.optim.SGD, momentum=0.9)
DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum_sgd": _MOMENTUM_SGD,
    "lars_sgd": _MOMENTUM_SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "partial_rowwise_adam": torch.optim.Adam,
    "lamb": torch.optim.Adam,
    "partial_rowwise_lamb": torch.optim.Adam,
}
"""Optimizers of the dense parameters, by the name of the rows' optimizer; where torch has none, the one that
comes next to it."""

LOWER_LAYERS, UPPER_LAYERS = [128], [128, 64, 1]
"""Sizes of the DLRM's perceptrons; the lower one ends with the embedding dimension."""

_SOME_BYTES = 1 << 30
"""Tables of which any share is a budget that a machine can have."""


def finish_imports(policy: AnyPolicy = "lookahead") -> None:
    """Load code that would be loaded later, so that memory measured afterwards is the tiers' alone.

    torch imports 70 MiB when the first optimizer is made. The compiler of the policies takes 60 MiB. Its
    first compilation takes 70 MiB more: that of ``policy``, which training needs wherever rows are evicted.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], lr=0.0)
    as_policy(policy).compile(1)


def load_dataset(args: argparse.Namespace) -> Dataset:
    """Load the data set of ``--data`` with the options that were given."""
    path = None if args.data_path is None else str(args.data_path)
    dataset = data.load(
        args.data, path=path, seed=args.seed, rows=args.rows, tables=args.tables, max_rows=args.max_rows
    )
    if dataset.num_train is None and args.steps is None and args.data.startswith("synthetic"):
        raise ConfigError(f"--data {args.data} never ends; say after how many batches to stop, by --steps")
    return dataset


def tier_config(args: argparse.Namespace, all_bytes: int) -> TierConfig:
    """Return the tiers that the options of the group "tiers" ask for; the tables take ``all_bytes``."""
    with named_as_options():
        return TierConfig(
            hbm=budget(args.hbm, all_bytes, "--hbm"),
            uvm=budget(args.uvm, all_bytes, "--uvm"),
            ssd=args.ssd,
            path=store_of(args),
            engine=args.engine,
            policy=args.policy,
            admission=args.admission,
            depth=args.depth,
            window=args.window,
            read_ahead=budget(args.read_ahead, all_bytes, "--read-ahead"),
            ssd_dtype=args.ssd_dtype,
            uvm_dtype=args.uvm_dtype,
            state_dtype=args.state_dtype,
            stochastic_rounding=args.rounding == "stochastic",
        )


def check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that are wrong by themselves, before a data set is read."""
    config = tier_config(args, _SOME_BYTES)
    with named_as_options():
        check_machine(replace(config, path=None))
    as_policy(config.policy)  # refuses one that no training can have
    dense = 4 * args.dim * (LOWER_LAYERS[-1] + len(UPPER_LAYERS) * UPPER_LAYERS[0])
    check_memory(3 * dense, "the dense layers, their gradients and optimizer", "--dim")
    check_memory(args.batch_size * (4 * args.dim + 12), "a batch of one table", "--batch-size, --dim")


def table_configs(dataset: Dataset, dim: int) -> list[tierstore.EmbeddingBagConfig]:
    """Return the tables of a data set, one feature each."""
    return [
        tierstore.EmbeddingBagConfig(
            name=table.name,
            embedding_dim=dim,
            num_embeddings=table.num_embeddings,
            feature_names=[table.name],
        )
        for table in dataset.tables
    ]


@contextmanager
def open_trainer(
    args: argparse.Namespace,
    dataset: Dataset,
    optimizer: OptimizerSpec,
    config: TierConfig,
    ranks: Ranks = ALONE,
    plan: ShardingPlan | None = None,
) -> Iterator[Trainer]:
    """Open a model of the seed's initial weights with its tiers, and close the tiers however the body ends.

    On ``ranks`` the tables are sharded by ``plan``. Closing commits nothing;
    :class:`tierstore.cli.checkpoint.Saver` makes the commits.
    """
    torch.manual_seed(args.seed)
    embeddings: Any = tierstore.EmbeddingBagCollection(
        tables=table_configs(dataset, args.dim),
        device=None if plan is None else "meta",
        config=config,
        optimizer=optimizer,
        seed=args.seed,
    )
    with ExitStack() as undo:
        undo.callback(lambda: embeddings.close(commit=False))
        model: Any = models.DLRM(embeddings, dataset.dense_dim, [*LOWER_LAYERS, args.dim], UPPER_LAYERS)
        if plan is not None:
            from tierstore.sharding import DistributedModelParallel

            model = DistributedModelParallel(model, ranks.env, plan=plan, config=config)
            undo.callback(lambda: model.close(commit=False))
            (embeddings,) = model.sharded.values()
        step = DENSE_OPTIMIZERS[optimizer.name](model.parameters(), lr=args.lr)
        schedule = Schedule(args.batch_size, args.epochs, args.steps, ranks)
        yield Trainer(model, embeddings, step, schedule)
