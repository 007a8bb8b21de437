from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from tierstore.data import Batch, load


def test_a_batch_is_a_pytree():
    batch = next(load("synthetic:zipf:1", tables=2, rows=50).train(8))
    leaves, structure = pytree.tree_flatten(batch)
    assert any(leaf is batch.sparse.values() for leaf in leaves)
    assert any(leaf is batch.labels for leaf in leaves)
    again = pytree.tree_unflatten(leaves, structure)
    assert isinstance(again, Batch)
    assert again.sparse.keys() == ["t0", "t1"]
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert ".dense" in names


def test_moving_a_batch():
    batch = next(load("synthetic:zipf:1", tables=2, rows=50, pooling_factor=3).train(8))
    moved = batch.to("meta")
    assert {part.device.type for part in (moved.dense, moved.sparse.values(), moved.labels)} == {"meta"}
    assert len(batch) == 8
    assert torch.equal(batch.to("cpu").sparse.values(), batch.sparse.values())
