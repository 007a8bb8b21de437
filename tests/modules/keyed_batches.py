"""Random keyed batches for the collections, and collections of ours and torchrec's with the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torchrec

from tests.modules.module_oracles import small_tiers
from tierstore import optim
from tierstore.modules import EmbeddingBagCollection, EmbeddingCollection
from tierstore.sparse import KeyedJaggedTensor

ROWS = 60


@dataclass
class KeyedBatch:
    """The same batch for both sides; ``weights`` as a leaf of its own on each."""

    ours: KeyedJaggedTensor
    theirs: torchrec.KeyedJaggedTensor


def keyed_batch(
    seed: int,
    keys: list[str],
    size: int = 4,
    *,
    weighted: bool = False,
    deduplicated: bool = False,
    dtype: torch.dtype = torch.int64,
    offsets: bool = False,
) -> KeyedBatch:
    """``size`` examples with bags of 0 to 4 ids per key; deduplicated ones have fewer bags than examples."""
    random = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {"keys": keys}
    if deduplicated:
        strides = torch.randint(1, size + 1, (len(keys),), generator=random).tolist()
        rows = [torch.randint(0, stride, (size,), generator=random) for stride in strides]
        arguments["stride_per_key_per_rank"] = [[stride] for stride in strides]
        arguments["inverse_indices"] = (keys, torch.stack(rows))
    else:
        strides = [size] * len(keys)
    lengths = torch.randint(0, 5, (sum(strides),), generator=random, dtype=dtype)
    total = int(lengths.sum())
    arguments["values"] = torch.randint(0, ROWS, (total,), generator=random, dtype=dtype)
    weights = torch.rand(total, generator=random) if weighted else None
    sides = []
    for kind in (KeyedJaggedTensor, torchrec.KeyedJaggedTensor):
        own = None if weights is None else weights.clone().requires_grad_()
        if offsets and lengths.numel():
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(dtype)])
            sides.append(kind.from_offsets_sync(**arguments, offsets=ends, weights=own))
        else:
            sides.append(kind.from_lengths_sync(**arguments, lengths=lengths, weights=own))
    return KeyedBatch(*sides)


def bag_collections(
    tables: list[torchrec.EmbeddingBagConfig], spec: optim.OptimizerSpec, weighted: bool = False
) -> tuple[EmbeddingBagCollection, torchrec.EmbeddingBagCollection]:
    """Ours, with few rows in memory, and torchrec's."""
    theirs = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    config = small_tiers({table.embedding_dim for table in tables}, spec)
    ours = EmbeddingBagCollection(tables, weighted, config=config, optimizer=spec)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def row_collections(
    tables: list[torchrec.EmbeddingConfig], spec: optim.OptimizerSpec, need_indices: bool = False
) -> tuple[EmbeddingCollection, torchrec.EmbeddingCollection]:
    """Ours, with few rows in memory, and torchrec's."""
    theirs = torchrec.EmbeddingCollection(tables=tables, need_indices=need_indices)
    config = small_tiers({table.embedding_dim for table in tables}, spec)
    ours = EmbeddingCollection(tables, need_indices=need_indices, config=config, optimizer=spec)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs
