"""Every kind of module under prefetch: the same bits as without, and lookups really made ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.modules.keyed_batches import keyed_batch
from tests.modules.module_oracles import scramble, small_tiers
from tierstore import TierConfig, optim
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)
from tierstore.pipeline.prefetch import prefetch
from tierstore.sparse import KeyedJaggedTensor

ROWS = 60
SPEC = optim.Adagrad(lr=0.1)


class Everything(nn.Module):
    """One module of each kind, each with tiers of its own."""

    def __init__(self, config: TierConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {"config": config, "optimizer": SPEC}
        self.bag = TieredEmbeddingBag(ROWS, 4, mode="sum", name="bag", **options)
        self.row = TieredEmbedding(ROWS, 4, padding_idx=3, name="row", **options)
        bags = [EmbeddingBagConfig(ROWS, 4, "t0", feature_names=["a", "b"]), EmbeddingBagConfig(ROWS, 3, "b")]
        self.bags = EmbeddingBagCollection(bags, True, **options)
        self.rows = EmbeddingCollection([EmbeddingConfig(ROWS, 4, "c")], **options)

    def tiered(self) -> list[Any]:
        return [self.bag, self.row, self.bags, self.rows]

    def forward(self, batch: dict[str, Any]) -> Tensor:
        ids, keyed = batch["ids"], batch["keyed"]
        weights = torch.linspace(0, 1, ids.numel()).view_as(ids)
        return (
            scramble(self.bag(ids, None, weights))
            + scramble(self.bag(batch["flat"], batch["offsets"], per_sample_weights=None))
            + scramble(self.row(ids))
            + scramble(self.bags(keyed).values())
            + scramble(self.rows(keyed)["c"].values())
        )


def batches(side: str, deduplicated: bool) -> list[dict[str, Any]]:
    made = []
    for seed in range(10):
        ids = torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(seed))
        keyed = keyed_batch(
            seed, ["a", "b", "c"], 4, weighted=True, offsets=seed % 2 == 0, deduplicated=deduplicated
        )
        flat, offsets = ids.flip(0).reshape(-1).to(torch.int32), torch.tensor([0, 5, 5])
        made.append({"ids": ids, "flat": flat, "offsets": offsets, "keyed": getattr(keyed, side)})
    return made


def train(model: Everything, loader: Iterable[dict[str, Any]]) -> list[Tensor]:
    losses = []
    for batch in loader:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def lookups_by_thread(model: Everything) -> dict[str, list[str]]:
    """Which threads prepare the lookups of each module; filled in during training."""
    seen: dict[str, list[str]] = {}
    for module in model.tiered():
        names = seen.setdefault(type(module).__name__, [])
        original = module.make_lookup

        def counted(*args: Any, _original: Any = original, _names: list[str] = names, **kwargs: Any) -> Any:
            _names.append(threading.current_thread().name)
            return _original(*args, **kwargs)

        module.make_lookup = counted
    return seen


@pytest.mark.parametrize(("side", "deduplicated"), [("ours", False), ("theirs", False), ("ours", True)])
def test_prefetch_changes_nothing_and_looks_everything_up_ahead(side: str, deduplicated: bool) -> None:
    data = batches(side, deduplicated)
    memory, ahead = Everything(TierConfig(hbm="all")), Everything(small_tiers([4, 3], SPEC))
    seen = lookups_by_thread(ahead)
    expected = train(memory, data)
    found = train(ahead, prefetch(data, ahead, depth=2, window=3))
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    main = threading.main_thread().name
    for name, threads in seen.items():
        per_batch = 2 if name == "TieredEmbeddingBag" else 1
        assert threads.count(main) == per_batch, name  # the batch that it learned from
        assert len(threads) == 10 * per_batch
    for module in (*memory.tiered(), *ahead.tiered()):
        module.close()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("names", [["b", "a"], ["x", "a"]])
def test_a_model_that_gives_the_keys_of_a_batch_other_names(names: list[str], given: bool) -> None:
    """The same ids under other keys are looked up in other tables."""
    tables = [EmbeddingBagConfig(ROWS, 4, f"t_{name}", feature_names=[name]) for name in names]
    data = [keyed_batch(seed, ["a", "b"]).ours for seed in range(6)]
    found = []
    for ahead in (False, True):
        module = EmbeddingBagCollection(tables, config=small_tiers([4], SPEC), optimizer=SPEC)
        inputs = {module: lambda keyed: keyed} if given else None
        outputs = []
        for keyed in prefetch(data, module, inputs=inputs, depth=2, window=3) if ahead else data:
            out = module(KeyedJaggedTensor(names, keyed.values(), lengths=keyed.lengths())).values()
            scramble(out).backward()
            outputs.append(out.detach())
        found.append([*outputs, *module.state_dict().values()])
        module.close()
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("copied", [False, True])
def test_a_batch_that_has_the_same_ids_under_two_sets_of_keys(
    copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The lookups are made ahead with the keys that the model looks up, whichever come first."""
    tables = [EmbeddingBagConfig(ROWS, 4, f"t_{name}", feature_names=[name]) for name in "ab"]
    found = []
    for ahead in (False, True):
        module = EmbeddingBagCollection(tables, config=small_tiers([4], SPEC), optimizer=SPEC)
        keyed = [keyed_batch(seed, ["a", "b"]).ours for seed in range(6)]
        data = [(k, KeyedJaggedTensor(["b", "a"], k.values(), lengths=k.lengths())) for k in keyed]
        outputs = []
        for _, given in prefetch(data, module, depth=2, window=3) if ahead else data:
            if copied:
                given = KeyedJaggedTensor(["b", "a"], given.values(), lengths=given.lengths())
            out = module(given).values()
            scramble(out).backward()
            outputs.append(out.detach())
        found.append([*outputs, *module.state_dict().values()])
        module.close()
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)
    assert not caplog.records, "looked up on demand"
