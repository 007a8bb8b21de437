"""``tierstore plan --data``: the tables of a data set of ``tierstore train``, and what batches use."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.messages import terminal_bars
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from cache_policies import PreparedTrace
    from tierstore import EmbeddingBagConfig
    from tierstore.placement import ShardingPlan, TablePlacement
    from tierstore.planner import TableSpec
    from tierstore.simulation import Counts, ShardCounts, Simulated, Training
    from tierstore.trace import Trace


_DEFAULTS = {"dim": 32, "optimizer": "rowwise-adagrad", "seed": 0}


@dataclass(frozen=True)
class PlannedData:
    """Tables, their recorded curves for the planner, and a line that says where both come from.

    ``trace``: the batches; ``training``: how they are trained, without the plan.
    """

    tables: list[TableSpec]
    stats: dict[str, Any]
    summary: str
    trace: Trace
    training: Training

    def simulate(self, plan: ShardingPlan) -> Simulated:
        """Count what the tiers of a plan miss on these batches: the planner's ``simulate``."""
        from tierstore.simulation import Simulated, simulated_halves

        training, batches = replace(self.training, plan=plan), self.trace.num_batches
        assert batches is not None
        with _bar(f"simulating {training.policy}", batches) as (progress, task):
            found = simulated_halves(
                self.trace, training, batches, lambda done: progress.update(task, completed=done)
            )
        cold, steady = ([_of_shards(table, of) for table in plan.tables] for of in (found.cold, found.steady))
        return Simulated(
            training.policy, found.cold_batches, found.batches, list(chain(*cold)), list(chain(*steady))
        )


def _of_shards(table: TablePlacement, by_rank: Sequence[Mapping[str, Counts]]) -> list[ShardCounts]:
    """Return the counts of a table's shards; shards on one rank share its counts equally."""
    from tierstore.simulation import ShardCounts

    on_rank = Counter(shard.rank for shard in table.shards)
    return [
        ShardCounts(*(figure / on_rank[shard.rank] for figure in by_rank[shard.rank][table.name]))
        for shard in table.shards
    ]


def add_data(group: Any) -> None:
    """Add the options that name a data set, as ``tierstore train`` has them."""
    group.add_argument(
        "--data",
        metavar="NAME",
        help="plan the tables of a data set of tierstore train; its batches are read for rows and misses",
    )
    group.add_argument("--data-path", type=Path, metavar="PATH", help="file or folder of the data set")
    group.add_argument("--rows", type=int, metavar="N", help="synthetic: rows per table")
    group.add_argument(
        "--max-rows", type=int, metavar="N", help="synthetic:criteo: cap of the rows per table"
    )
    group.add_argument("--steps", type=int, metavar="N", help="batches of the training (default: all)")
    group.add_argument(
        "--dim", type=int, default=_DEFAULTS["dim"], metavar="D", help="embedding dimension (default: 32)"
    )
    group.add_argument(
        "--optimizer",
        default=_DEFAULTS["optimizer"],
        metavar="NAME",
        help="optimizer of the rows (default: rowwise-adagrad)",
    )
    group.add_argument(
        "--policy",
        metavar="NAME",
        help="eviction policy of the training, for the predicted misses (default: lookahead)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated data (default: 0)")


def check_data(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the options name either a list of tables or a data set."""
    if args.data is None:
        if args.tables is None:
            raise ConfigError("give the tables: --tables YAML, or --data NAME for those of a data set")
        for option in ("data_path", "rows", "max_rows", "steps", "policy", *_DEFAULTS):
            if getattr(args, option) != _DEFAULTS.get(option):
                raise ConfigError(f"--{option.replace('_', '-')} is about a data set; give --data NAME, too")
        return
    if args.tables is not None and not args.tables.isdecimal():
        raise ConfigError(
            f"--tables {args.tables}: with --data it is the number of tables of generated data; leave one out"
        )
    for option in ("steps", "batch_size", "dim", "rows", "max_rows"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}; it must be at least 1")


def planned_data(args: argparse.Namespace, ranks: int) -> PlannedData:
    """Read the batches that ``ranks`` ranks train on; return the tables, and what the batches use of them."""
    from tierstore import optim
    from tierstore.cache.tiers.sizes import as_policy
    from tierstore.cli.setup import load_dataset, table_configs
    from tierstore.config import TierConfig
    from tierstore.simulation import Training
    from tierstore.trace import from_dataset, steady_curves
    from tierstore.trace.source import first_batches

    optimizer = optim.make(args.optimizer.replace("-", "_"), lr=1.0)
    config = TierConfig(policy=args.policy or "lookahead")
    policy = as_policy(config.policy)  # refuses one that no training can have
    number = None if args.tables is None else int(args.tables)
    dataset = load_dataset(argparse.Namespace(**{**vars(args), "tables": number}))
    examples = args.batch_size * ranks
    trace = from_dataset(dataset, examples)
    trace = trace if args.steps is None else first_batches(trace, args.steps)
    prepared = _read(trace)
    trace = replace(trace, num_batches=prepared.batches)
    with _bar(f"miss curves of {policy.name}", len(trace.tables)) as (progress, task):
        curves = steady_curves(
            trace, prepared, policy, args.depth, lambda done: progress.update(task, completed=done)
        )
    configs = table_configs(dataset, args.dim)
    specs = [_spec(config, curves[config.name], examples, optimizer.name) for config in configs]
    rows, plural = sum(spec.num_embeddings for spec in specs), "s" * (ranks > 1)
    summary = (
        f"{dataset.name}: {prepared.batches:,} batches of {examples:,} examples on {ranks} rank{plural} use "
        f"{prepared.footprint:,} of {rows:,} rows"
    )
    stats = {name: curve for name, curve in curves.items() if curve["accesses"]}
    return PlannedData(specs, stats, summary, trace, Training(configs, config, optimizer))


def _spec(config: EmbeddingBagConfig, used: Mapping[str, Any], examples: int, optimizer: str) -> TableSpec:
    """Return a table, of which batches of ``examples`` were ``used``."""
    from tierstore.planner import TableSpec

    return TableSpec(
        config.name,
        config.num_embeddings,
        config.embedding_dim,
        tuple(config.feature_names),
        pooling_factor=max(used["accesses"], 1e-9) / examples,
        optimizer=optimizer,
        touched_rows=max(1, used["footprint"]),
    )


def _read(trace: Trace) -> PreparedTrace:
    """Read all batches, with a bar on a terminal. Raises ConfigError if they use no row."""
    from cache_policies import prepare

    with _bar("reading the batches", trace.num_batches) as (progress, reading):
        prepared = prepare(progress.track(trace.key_batches(), task_id=reading, total=trace.num_batches))
    if not prepared.accesses:
        raise ConfigError(f"--data {trace.name} has no examples to train on; look at its files")
    return prepared


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[tuple[Any, Any]]:
    """Show a bar on a terminal; yield rich's Progress, and the task in it."""
    with terminal_bars() as progress:
        yield progress, progress.add_task(title, total=total)
