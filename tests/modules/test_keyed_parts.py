"""What a collection keeps from batch to batch does not depend on the batches before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import scramble
from tierstore import TierConfig, optim
from tierstore.errors import InputError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from tierstore.modules.collection import Collection
from tierstore.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS = ["f0", "f1", "f2", "f3"]
SPEC = optim.Adagrad(lr=0.1)
TABLES = [
    EmbeddingBagConfig(ROWS, 4, "t0", feature_names=["f3", "f1"]),
    EmbeddingBagConfig(ROWS, 3, "t1", feature_names=["f0"]),
    EmbeddingBagConfig(ROWS, 4, "t2", feature_names=["f1"]),
]


def collection(weighted: bool = False, config: TierConfig | None = None) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(TABLES, weighted, config=config or TierConfig(hbm="all"), optimizer=SPEC)


def batches(weighted: bool) -> list[KeyedJaggedTensor]:
    """Keys in several orders, some of which have no feature; sizes differ, and offsets or inverse indices
    are there or not."""
    orders = [KEYS, KEYS, ["f1", "f0", "f3"], ["f3", "other", "f1", "f0"], KEYS[::-1], KEYS]
    kinds = [(4, False), (0, False), (3, True), (4, False), (2, True), (5, False)]
    return [
        keyed_batch(
            number, keys, max(size, 1), weighted=weighted, deduplicated=deduplicated, offsets=size % 2 == 0
        ).ours
        for number, (keys, (size, deduplicated)) in enumerate(zip(orders, kinds, strict=True))
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_batches_with_other_keys(weighted: bool) -> None:
    with collection(weighted) as module, collection(weighted) as fresh:
        for keyed in batches(weighted) * 2:
            found = module(keyed).values()
            fresh.lookups._parts = None
            expected = fresh(keyed).values()
            assert torch.equal(found, expected)
            scramble(found).backward()
            scramble(expected).backward()
        for config in TABLES:
            ids = torch.arange(ROWS)
            assert torch.equal(module.rows(ids, config.name), fresh.rows(ids, config.name))


def row_collection() -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(ROWS, 4, "t0", feature_names=["f3", "f1"]),
        EmbeddingConfig(ROWS, 3, "t1", feature_names=["f0"]),
        EmbeddingConfig(ROWS, 4, "t2", feature_names=["f1"]),
    ]
    return EmbeddingCollection(tables, config=TierConfig(hbm="all"), optimizer=SPEC)


def test_rows_of_batches_with_other_keys() -> None:
    with row_collection() as module, row_collection() as fresh:
        for keyed in batches(False) * 2:
            found = module(keyed)
            fresh.lookups._parts = None
            expected = fresh(keyed)
            assert list(found) == list(expected) == ["f3", "f1@t0", "f0", "f1@t2"]
            for name, part in found.items():
                own = keyed[name.partition("@")[0]]
                assert torch.equal(part.values(), expected[name].values())
                assert torch.equal(part.lengths(), own.lengths())
                assert part.values().size(0) == own.values().numel()
            for rows in (found, expected):
                torch.stack([scramble(part.values()) for part in rows.values()]).sum().backward()
        for config in module.embedding_configs():
            ids = torch.arange(ROWS)
            assert torch.equal(module.rows(ids, config.name), fresh.rows(ids, config.name))


@pytest.mark.parametrize("make", [collection, row_collection])
def test_a_wrong_id_is_named_with_its_feature(make: Callable[[], Collection]) -> None:
    keys = ["f1", "f0", "f3"]
    with make() as module:
        for _ in range(2):
            batch = KeyedJaggedTensor(
                keys, torch.tensor([1, ROWS, 3]), lengths=torch.ones(3, dtype=torch.int32)
            )
            with pytest.raises(InputError, match=f"feature 'f0': id {ROWS} at position 0 is out of range"):
                module(batch)


@pytest.mark.parametrize("make", [collection, row_collection])
def test_a_graph_that_is_kept_updates_again_and_another_is_refused(make: Callable[[], Collection]) -> None:
    keyed, ids = batches(False)[0], torch.arange(ROWS)
    with make() as module, make() as other:
        loss = total(module(keyed))
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            gradients = total(other(keyed))
            gradients.backward()
        assert torch.equal(module.rows(ids, "t0"), other.rows(ids, "t0"))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert torch.equal(module.rows(ids, "t0"), other.rows(ids, "t0"))


@pytest.mark.parametrize("make", [collection, row_collection])
def test_checkpointed_activations_do_not_change_the_training(make: Callable[[], Collection]) -> None:
    """torch runs the block again in the backward pass."""
    ids = torch.arange(ROWS)
    with make() as module, make() as other:
        for keyed in (batches(False)[0], batches(False)[3]):
            checkpoint(lambda given: total(module(given)).square(), keyed, use_reentrant=False).backward()
            total(other(keyed)).square().backward()
        assert torch.equal(module.rows(ids, "t0"), other.rows(ids, "t0"))


def total(found: KeyedTensor | dict[str, JaggedTensor]) -> Tensor:
    """A loss whose gradients do not depend on the rows."""
    if isinstance(found, dict):
        return torch.cat([part.values().flatten() for part in found.values()]).sum()
    return found.values().sum()


def test_a_keyed_tensor_of_parts_is_the_one_that_is_constructed() -> None:
    with collection() as module:
        found = module(batches(False)[0])
        same = KeyedTensor(found.keys(), found.length_per_key(), found.values())
        assert type(found) is KeyedTensor
        assert vars(found) == vars(same) | {"_values": found.values()}
        assert torch.equal(found["f0"], same["f0"])


def test_keys_that_are_changed_in_place() -> None:
    keys = ["f0", "f1", "f3"]
    with collection() as module:
        first = module(
            KeyedJaggedTensor(keys, torch.tensor([1, 2, 3]), lengths=torch.ones(3, dtype=torch.int32))
        )
        keys[0], keys[1] = keys[1], keys[0]
        swapped = module(
            KeyedJaggedTensor(keys, torch.tensor([2, 1, 3]), lengths=torch.ones(3, dtype=torch.int32))
        )
        assert torch.equal(first.values(), swapped.values())
        keys[0] = "f0"
        again = KeyedJaggedTensor(keys, torch.tensor([2, 1, 3]), lengths=torch.ones(3, dtype=torch.int32))
        with pytest.raises(InputError, match="keys must be unique"):
            module(again)


def test_going_to_a_commit_makes_other_tiers(tmp_path: Path) -> None:
    config = TierConfig(hbm="1MiB", path=str(tmp_path / "store"))
    with collection(config=config) as module:
        keyed = batches(False)[0]
        first = module.commit()
        expected = module(keyed).values()
        scramble(expected).backward()
        assert not torch.equal(module(keyed).values(), expected)
        module.engine.go_to(first)
        assert torch.equal(module(keyed).values(), expected)


def test_the_output_does_not_share_its_lists() -> None:
    with collection() as module:
        keyed = batches(False)[0]
        found = module(keyed)
        names = list(found.keys())
        found.keys().clear()
        found.length_per_key().clear()
        assert module(keyed).keys() == names
        assert module(keyed).length_per_key() == [4, 4, 3, 4]
