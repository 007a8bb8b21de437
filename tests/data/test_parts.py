"""Parts of batches, of which every rank of a job trains on one."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tierstore.cli.trainer import mean_loss
from tierstore.data import Batch
from tierstore.data.parts import PartOfBatch, part_of
from tierstore.sparse import KeyedJaggedTensor


def batch_of(size: int, weighted: bool = False) -> Batch:
    """Bags of 0 to 3 ids of two keys."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    ids = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    sparse = KeyedJaggedTensor(["a", "b"], ids, weights, lengths=lengths, stride=size)
    return Batch(torch.rand(size, 3, generator=generator), sparse, (torch.arange(size) % 2).float())


@pytest.mark.parametrize("size", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_make_the_batch(size: int, ranks: int, weighted: bool) -> None:
    batch = batch_of(size, weighted)
    parts = [part_of(batch, rank, ranks) for rank in range(ranks)]
    sizes = [len(part) for part in parts]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert all(part.whole == size for part in parts)
    assert torch.equal(torch.cat([part.dense for part in parts]), batch.dense)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    for key in ("a", "b"):
        whole, cut = batch.sparse[key], [part.sparse[key] for part in parts]
        assert torch.equal(torch.cat([one.values() for one in cut]), whole.values())
        assert torch.equal(torch.cat([one.lengths() for one in cut]), whole.lengths())
        if weighted:
            assert torch.equal(torch.cat([one.weights() for one in cut]), whole.weights())


def test_a_part_is_a_pytree() -> None:
    part = part_of(batch_of(5), 1, 2)
    again = pytree.tree_map(lambda tensor: tensor, part)
    assert isinstance(again, PartOfBatch)
    assert (again.whole, again.weight) == (5, 3 * 2 / 5)
    assert torch.equal(again.labels, part.labels)


@pytest.mark.parametrize("size", [1, 5, 8])
def test_the_mean_over_ranks_is_the_mean_of_the_batch(size: int) -> None:
    batch = batch_of(size)
    whole = torch.linspace(-1, 1, size, requires_grad=True)
    mean_loss(whole, batch).backward()
    logits = whole.detach().requires_grad_()
    parts = [part_of(batch, rank, 2) for rank in range(2)]
    losses = [
        mean_loss(one, part) for one, part in zip(logits.split([len(p) for p in parts]), parts, strict=True)
    ]
    (sum(losses) / 2).backward()
    assert whole.grad is not None
    assert logits.grad is not None
    assert torch.allclose(logits.grad, whole.grad, rtol=1e-6, atol=0)
