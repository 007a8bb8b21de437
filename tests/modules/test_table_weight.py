"""``weight`` of a collection's table: it reads and writes as torchrec's does, or says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec
from torch import Tensor, nn

from tests.modules.module_oracles import small_tiers
from tierstore import EmbeddingBagCollection, EmbeddingCollection, TierConfig, optim
from tierstore.errors import ConfigError, InputError

ROWS, DIM = 30, 4
SPEC = optim.SGD(lr=0.1)
KINDS = {
    "embedding_bags": (
        torchrec.EmbeddingBagCollection,
        EmbeddingBagCollection,
        torchrec.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"]),
    ),
    "embeddings": (
        torchrec.EmbeddingCollection,
        EmbeddingCollection,
        torchrec.EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"]),
    ),
}


@pytest.fixture(params=KINDS)
def pair(request: Any) -> Any:
    """A torchrec table and ours with the same rows."""
    theirs, ours, config = KINDS[request.param]
    one = theirs(tables=[config])
    with ours(tables=[config], config=small_tiers([DIM], SPEC, 20), optimizer=SPEC) as other:
        tables = getattr(one, request.param)["t"], getattr(other, request.param)["t"]
        with torch.no_grad():
            tables[1].weight.copy_(tables[0].weight)
        yield tables


READS: list[Callable[[Any], Any]] = [
    lambda w: [w.shape, w.size(), w.size(1), w.dim(), w.ndim, w.numel(), len(w), w.dtype, w.device],
    lambda w: [w.requires_grad, w.is_leaf, w.grad],
    lambda w: w.detach(),
    lambda w: w.detach().cpu().numpy(),
]
READS_WITHOUT_GRADIENTS: list[Callable[[Any], Any]] = [
    lambda w: w[3],
    lambda w: w[-1],
    lambda w: w[2:20:3],
    lambda w: w[torch.tensor([5, 0, 5])],
    lambda w: w.clone(),
    lambda w: w.norm(dim=1),
    lambda w: w.T,
    lambda w: torch.stack([w, w]),
    lambda w: torch.equal(w, w.clone()),
    lambda w: torch.nn.functional.embedding(torch.tensor([1, 2]), w),
    lambda w: torch.ones(2, DIM) @ w.T,
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return type(other) is Tensor and one.dtype == other.dtype and torch.equal(one, other)
    return bool((one == other).all()) if hasattr(one, "all") else one == other


@pytest.mark.parametrize("read", [*READS, *READS_WITHOUT_GRADIENTS])
def test_reads_agree(pair: Any, read: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        theirs, ours = (read(table.weight) for table in pair)
    assert same(theirs.detach() if isinstance(theirs, Tensor) else theirs, ours)


@pytest.mark.parametrize("read", READS)
def test_what_needs_no_gradient_is_read_at_any_time(pair: Any, read: Callable[[Any], Any]) -> None:
    assert same(*(read(table.weight) for table in pair))


@pytest.mark.parametrize("read", READS_WITHOUT_GRADIENTS)
def test_a_read_that_would_lose_its_gradient_is_an_error(pair: Any, read: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="weight would have no gradient here"):
        read(pair[1].weight)
    pair[1].collection.requires_grad_(False)  # as of a frozen table, no gradient is lost
    pair[0].requires_grad_(False)
    assert same(*(read(table.weight) for table in pair))


def test_writes_agree(pair: Any) -> None:
    rows = torch.arange(3.0 * DIM).view(3, DIM)
    for table in pair:
        with torch.no_grad():
            table.weight[torch.tensor([4, 9, 1])] = rows
            table.weight[-2] = rows[0]
            table.weight[10:12] = 7.0
    assert torch.equal(pair[0].weight, pair[1].weight.detach())
    every = torch.rand(ROWS, DIM)
    for table in pair:
        with torch.no_grad():
            table.weight.copy_(every)
    assert torch.equal(every, pair[1].rows(torch.arange(ROWS)))


CHANGES = [nn.init.normal_, nn.init.xavier_uniform_, nn.init.zeros_, lambda w: w.add_(1), lambda w: w.data]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_errors(pair: Any, change: Callable[[Any], Any]) -> None:
    before = pair[1].weight.detach()
    with torch.no_grad(), pytest.raises(ConfigError, match=r"would change rows.*load_rows\(\)"):
        change(pair[1].weight)
    assert torch.equal(before, pair[1].weight.detach())


def test_wrong_uses_are_errors(pair: Any) -> None:
    weight = pair[1].weight
    assert not hasattr(weight, "nothing")
    assert repr(weight) == "TableWeight('t', (30, 4), torch.float32)"
    with torch.no_grad():
        for ids in (ROWS, -ROWS - 1):
            with pytest.raises(IndexError):
                weight[ids]
        with pytest.raises(InputError, match="id 30 at position 0 is out of range"):
            weight[torch.tensor([ROWS])]


def test_a_table_too_large_for_a_tensor_is_read_in_parts() -> None:
    config = torchrec.EmbeddingBagConfig(
        num_embeddings=10**12, embedding_dim=DIM, name="t", feature_names=["f"]
    )
    with EmbeddingBagCollection([config], config=TierConfig(hbm="1MiB", engine="memory")) as module:
        weight = module.embedding_bags["t"].weight
        assert weight.shape == (10**12, DIM)
        with pytest.raises(InputError, match=r"too large for one tensor .*weight\[ids\]"):
            weight.detach()
        with torch.no_grad():
            weight[10**12 - 1] = 2.0
            assert weight[-1].tolist() == [2.0] * DIM
