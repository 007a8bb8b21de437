"""What a training writes for other commands: the trace of its batches, and its tables' curves. Ranks write
one file together, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cache_policies.joined_curves import joined_curve
from cache_policies.table_curve import planner_document
from tierstore.cli.ranks import Ranks
from tierstore.placement import ShardingPlan, ShardingType
from tierstore.result_file import option_errors
from tierstore.sparse import KeyedJaggedTensor
from tierstore.trace import TraceRecorder


class Recording:
    """Records batches, each with the examples of all ranks. ``recorder``: on rank 0; None on other ranks."""

    def __init__(self, recorder: TraceRecorder | None, ranks: Ranks) -> None:
        self._recorder, self._ranks = recorder, ranks

    def record(self, features: KeyedJaggedTensor) -> None:
        """Record a batch, of which this rank has ``features``. All ranks call it."""
        if not self._ranks.sharded:
            assert self._recorder is not None
            self._recorder.record_features(features)
            return
        keys = features.keys()
        parts = self._ranks.gather([features[key].values().numpy() for key in keys])
        if self._recorder is not None:
            whole = (np.concatenate(of_ranks) for of_ranks in zip(*parts, strict=True))
            self._recorder.record(dict(zip(keys, whole, strict=True)))


@contextmanager
def recording(path: Path, tables: Mapping[str, int], rate: float, ranks: Ranks) -> Iterator[Recording]:
    """Record to ``path`` (``--record``) the rows of ``tables`` that training uses; a training that ends early
    leaves a readable file."""
    recorder: TraceRecorder | None = None
    with ranks.shared_errors(), option_errors("--record", path):
        if ranks.prints:
            recorder = TraceRecorder(path, tables, rate)
    try:
        yield Recording(recorder, ranks)
    finally:
        if recorder is not None:
            with option_errors("--record", path):
                recorder.close()


def planners_curves(engine: Any, plan: ShardingPlan | None, ranks: Ranks) -> dict[str, Any]:
    """Return the curves of whole tables, as ``tierstore plan --stats`` reads them. All ranks call it.

    Shards of rows are joined. Shards of columns are looked up together, so the shards of the first columns
    stand for all of them.
    """
    if plan is None:
        found: dict[str, Any] = engine.table_curves()
        return found
    from tierstore.sharding.shards import shard_name

    known, own = {curve.name: curve for curve in engine.curves()}, {}
    for table in plan.tables:
        if table.sharding_type is ShardingType.DATA_PARALLEL and ranks.rank:
            continue  # rank 0 has the same
        for shard in table.shards:
            if shard.rank == ranks.rank and shard.rows and not shard.column_start:
                own[table.name] = known[shard_name(table.name, table.embedding_dim, shard)]
    everyone = ranks.gather(own)
    return planner_document(
        "live",
        [
            joined_curve(
                table.name, table.num_embeddings, [of[table.name] for of in everyone if table.name in of]
            )
            for table in plan.tables
        ],
    )
