"""offload(): whole models go on training as before, with their embeddings in tiers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import Tensor, nn

from tests.modules.keyed_batches import keyed_batch
from tests.modules.module_oracles import PAIRS, Pair, close, scramble, small_tiers
from tierstore import TierConfig, optim
from tierstore.errors import ConfigError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    TieredEmbedding,
    TieredEmbeddingBag,
    offload,
)

ROWS = 60
SPEC = optim.SGD(lr=0.1)


class Mixed(nn.Module):
    """Every kind of embedding, at different depths."""

    def __init__(self) -> None:
        super().__init__()
        bags, rows = torchrec.EmbeddingBagConfig, torchrec.EmbeddingConfig
        mean = torchrec.PoolingType.MEAN
        self.user = nn.Embedding(ROWS, 4, padding_idx=0)
        self.inner = nn.ModuleDict({"bag": nn.EmbeddingBag(ROWS, 3, mode="max", include_last_offset=True)})
        self.bags = torchrec.EmbeddingBagCollection(
            [
                bags(ROWS, 4, "t0", feature_names=["a"]),
                bags(ROWS, 3, "t1", feature_names=["b"], pooling=mean),
            ]
        )
        self.rows = torchrec.EmbeddingCollection([rows(ROWS, 4, "t0", feature_names=["b"])])
        self.top = nn.Linear(7, 1)

    def forward(self, ids: Tensor, keyed: Any) -> Tensor:
        offsets = torch.arange(0, ids.numel() + 1, ids.size(1))
        inner = self.inner["bag"](ids.view(-1), offsets)
        head = self.top(torch.cat([self.user(ids).sum(1), inner], 1)).sum()
        return head + scramble(self.bags(keyed).values()) + scramble(self.rows(keyed)["b"].values())


class Tied(nn.Module):
    """A language model's usual trick: the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(4, ROWS, bias=False)
        self.head.weight = self.emb.weight


def small(spec: optim.OptimizerSpec = SPEC, **options: Any) -> TierConfig:
    return small_tiers([4, 3], spec, **options)


def batch_of(seed: int) -> tuple[Tensor, Any]:
    ids = torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(seed))
    return ids, keyed_batch(seed, ["a", "b"])


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair.sparse], ids=lambda pair: pair.name)
def test_training_goes_on_as_before(pair: Pair) -> None:
    theirs = Mixed()
    theirs.inner.requires_grad_(False)
    ours = copy.deepcopy(theirs)
    replaced = offload(ours, small(pair.spec), pair.spec)
    assert list(replaced) == ["user", "inner.bag", "bags", "rows"]
    kinds = [TieredEmbedding, TieredEmbeddingBag, EmbeddingBagCollection, EmbeddingCollection]
    assert [type(module) for module in replaced.values()] == kinds
    assert ours.bags is replaced["bags"]
    assert len(replaced.optimizers) == 3
    assert "5 tables of 4.219 KiB" in repr(replaced)
    assert [name for name, p in ours.named_parameters() if p.numel()] == ["top.weight", "top.bias"]
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        name.replace("weight", "tiered_weight")
        for name, p in theirs.named_parameters()
        if not p.requires_grad
    }
    trained = [p for p in theirs.parameters() if p.requires_grad and p.dim() == 2 and len(p) == ROWS]
    dense = [pair.make(trained), torch.optim.SGD(theirs.top.parameters(), lr=0.1)]
    top = torch.optim.SGD(ours.parameters(), lr=0.1)
    with replaced:
        for seed in range(3):
            ids, keyed = batch_of(seed)
            for model, optimizers, own in ((ours, [top], keyed.ours), (theirs, dense, keyed.theirs)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                model(ids, own).backward()
                for optimizer in optimizers:
                    optimizer.step()
        state = theirs.state_dict()
        assert set(ours.state_dict()) == set(state)
        for name, weight in ours.state_dict().items():
            close(weight, state[name])
        assert replaced.stats()["tiers"]["ssd"]["row_hits"] > 0
        close(ours.eval()(ids, keyed.ours), theirs.eval()(ids, keyed.theirs))


def test_a_module_at_two_places_stays_one() -> None:
    user = nn.Embedding(ROWS, 4)
    model = nn.ModuleDict({"a": user, "b": nn.ModuleDict({"c": user})})
    with offload(model, small(), SPEC) as replaced:
        assert list(replaced) == ["a"]
        assert model["a"] is model["b"]["c"] is replaced["a"]


def test_modes_and_hooks_are_kept() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 4), "b": nn.Embedding(ROWS, 4)})
    model["b"].eval()
    with offload(model, small(), SPEC):
        assert model["a"].training
        assert not model["b"].training


def test_a_committed_store_wins_over_the_model(tmp_path: Path) -> None:
    config = small(engine="rocksdb", path=str(tmp_path / "store"))
    first, second = Mixed(), Mixed()
    ids, keyed = batch_of(1)
    with offload(first, config, SPEC) as replaced:
        first(ids, keyed.ours).backward()
        assert replaced.commit() >= 1
        replaced.flush()
        expected = first.state_dict()
    with offload(second, config, SPEC) as replaced:
        for name, weight in second.state_dict().items():
            if not name.startswith("top"):
                assert torch.equal(weight, expected[name])
        replaced.reset_stats()
        assert replaced["user"].fused_optimizer.num_updates == 1


def owns_the_weight() -> nn.Module:
    model = nn.Module()
    model.emb = nn.Embedding(5, 3)
    model.weight = model.emb.weight
    return model


def frozen_in_part() -> nn.Module:
    model = Mixed()
    model.bags.embedding_bags["t0"].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(3, 3), "no nn.Embedding, nn.EmbeddingBag or torchrec collection"),
        (lambda: nn.Embedding(3, 3), "the model itself is a Embedding"),
        (owns_the_weight, "emb shares its weight with the model itself"),
        (Tied, "emb shares its weight with head"),
        (lambda: nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), "0: max_norm is not supported"),
        (lambda: nn.Sequential(nn.Embedding(3, 3, dtype=torch.float64)), "0: .*weights of a table are"),
        (frozen_in_part, "bags has frozen and trained tables"),
    ],
)
def test_models_that_cannot_be_offloaded_stay_as_they_are(model: Any, message: str) -> None:
    made = model()
    before = dict(made.named_modules())
    with pytest.raises(ConfigError, match=message):
        offload(made, small(), SPEC)
    assert dict(made.named_modules()) == before


@pytest.mark.parametrize("model", [5, None, nn.Embedding])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"give an nn\.Module that has embeddings"):
        offload(model)


def test_hooks_are_kept() -> None:
    """And their handles still remove them."""
    model = nn.Sequential(nn.Embedding(ROWS, 4))
    seen: list[str] = []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: seen.append("before")),
        model[0].register_forward_hook(
            lambda module, args, kwargs, out: seen.append(type(module).__name__), with_kwargs=True
        ),
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    with offload(model, small(), SPEC):
        ids = torch.tensor([1, 2])
        model(ids).sum().backward()
        assert seen == ["before", "TieredEmbedding", "backward"]
        for handle in handles:
            handle.remove()
        model(ids).sum().backward()
        assert len(seen) == 3


def test_a_budget_too_small_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Embedding(ROWS, 4))
    with pytest.raises(ConfigError, match="it must be one of"):
        offload(Mixed(), small(), torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="below the minimum"):
        offload(model, TierConfig(hbm=10, engine="memory"), SPEC)
    assert type(model[0]) is nn.Embedding


def test_subclasses_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(Scaled(ROWS, 4), nn.Embedding(ROWS, 4))
    with caplog.at_level("WARNING", logger="tierstore"), offload(model, small(), SPEC) as replaced:
        assert list(replaced) == ["1"]
    assert "0 is a Scaled and was left alone" in caplog.text


def test_offloading_twice_finds_nothing_left() -> None:
    model = Mixed()
    with offload(model, small(), SPEC), pytest.raises(ConfigError, match=r"has no nn\.Embedding"):
        offload(model, small(), SPEC)
