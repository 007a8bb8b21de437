"""Sharded EmbeddingCollections against the single process: bit for bit, whatever the cut."""

from __future__ import annotations

from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, optim
from tierstore.sharding import (
    ShardingEnv,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)


def sequences() -> None:
    env = ShardingEnv.from_process_group()
    configs = [
        EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names)
        for t in cases.tables()
    ]
    names = [table.name for table in configs]
    data = cases.batches(2, 3, empty=0)
    cuts = {
        "mixed": [row_wise([13, 37]), column_wise([1, 0], [3, 7]), data_parallel(), table_wise(0)],
        "one rank idle": [table_wise(1), column_wise([1, 1]), table_wise(1), table_wise(1)],
        "within hosts": [table_row_wise(0), table_column_wise(1), grid_shard([1, 0]), table_row_wise(1)],
    }
    for name, chosen in cuts.items():
        cases.check(
            env,
            dict(zip(names, chosen, strict=True)),
            configs,
            data,
            optim.Adam(lr=0.05),
            tiers=cases.TIGHT,
            ranks_per_host=1 if name == "within hosts" else None,
        )


def test_sequences_are_those_of_the_single_process() -> None:
    run(2, sequences)
