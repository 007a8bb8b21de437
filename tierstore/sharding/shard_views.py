"""Weights of sharded tables as ShardedTensors, as torch.distributed.checkpoint saves and loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tierstore.errors import InputError
from tierstore.modules.tables import STATE_DICT_LIMIT, ThreadFlag, id_ranges
from tierstore.placement import ShardPlacement, TablePlacement

if TYPE_CHECKING:
    from tierstore.sharding.collection import ShardedCollection

wanted = ThreadFlag()
"""Raised while this thread makes a sharded state dict."""


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()``, but every rank has copies of its own shards only.

    The names are those of the unsharded model. Weights of tables that are cut, or held by some ranks only,
    are ShardedTensors of float32 on the CPU; data-parallel ones and everything else are as in
    ``state_dict()``. ``torch.distributed.checkpoint.save`` writes each shard from where it is, and ``load``
    into the sharded state dict of a model with another plan cuts them anew;
    ``module.load_state_dict(state)`` writes them to the tiers. A table of which a rank would have to copy
    more than 1 GiB is a tensor without data (device "meta"), which changes nothing when it is loaded:
    commits keep its rows.

    All ranks call it.
    """
    with wanted.raised():
        return module.state_dict()


def is_small(table: TablePlacement) -> bool:
    """Whether every rank can copy its shards into a state dict."""
    held: dict[int, int] = {}
    for part in table.shards:
        held[part.rank] = held.get(part.rank, 0) + 4 * part.rows * part.columns
    return max(held.values()) <= STATE_DICT_LIMIT


def view_of(collection: ShardedCollection, name: str) -> Any:
    """The ShardedTensor (rows, columns) of a table, with copies of this rank's shards."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    table, group = collection.plan.table(name), collection.env.process_group
    described = {
        _key(part): ShardMetadata(
            [part.row_start, part.column_start],
            [part.rows, part.columns],
            f"rank:{dist.get_global_rank(group, part.rank)}/cpu",
        )
        for part in table.shards
        if part.rows and part.columns
    }
    shards = []
    for local in collection.local_shards(name):
        key = (local.rows[0], local.columns.start)
        (begin, end), columns = local.rows, local.columns.stop - local.columns.start
        if begin == end or not columns:
            continue
        weight = torch.empty((end - begin, columns))
        for first, last in id_ranges(begin, end):
            values, _ = collection.engine.read_rows(local.local, np.arange(first, last))
            weight[first - begin : last - begin] = torch.from_numpy(values)
        shards.append(Shard(weight, described[key]))
    whole = ShardedTensorMetadata(
        list(described.values()),
        torch.Size((table.num_embeddings, table.embedding_dim)),
        TensorProperties(dtype=torch.float32),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, whole, process_group=group)


def load_view(collection: ShardedCollection, name: str, key: str, view: Any) -> None:
    """Writes this rank's shards of a ShardedTensor; InputError, on every rank, if it is cut differently."""
    table = collection.plan.table(name)
    group = collection.env.process_group
    found = {
        (*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank())
        for shard in view.metadata().shards_metadata
    }
    wanted = {
        (*_key(part), part.rows, part.columns, dist.get_global_rank(group, part.rank))
        for part in table.shards
        if part.rows and part.columns
    }
    if found != wanted:
        raise InputError(
            f"{key} is cut in another way than this model's plan says; load the checkpoint by "
            "torch.distributed.checkpoint.load into sharded_state_dict(model), which cuts it anew"
        )
    given: dict[tuple[int, int], Tensor] = {
        tuple(shard.metadata.shard_offsets): shard.tensor for shard in view.local_shards()
    }
    for local in collection.local_shards(name):
        begin, end = local.rows
        weight = given.get((begin, local.columns.start))
        if weight is None:  # a shard of no rows
            continue
        for first, last in id_ranges(begin, end):
            values = weight[first - begin : last - begin].detach().numpy()
            collection.engine.write_rows(local.local, np.arange(first, last), values, None)


def _key(part: ShardPlacement) -> tuple[int, int]:
    return part.row_start, part.column_start
