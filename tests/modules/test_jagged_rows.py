"""What an EmbeddingCollection returns is cut out of whole tensors when it is asked for, and is the same."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import small_tiers
from tierstore import optim
from tierstore.modules import EmbeddingCollection, EmbeddingConfig
from tierstore.sparse import JaggedTensor, KeyedJaggedTensor

SPEC = optim.SGD(lr=0.5)
KEYS = ["a", "b", "c"]


def collection(**options: Any) -> EmbeddingCollection:
    """Two tables of two row layouts and four outputs."""
    tables = [
        EmbeddingConfig(ROWS, 4, "t", feature_names=["a", "b"]),
        EmbeddingConfig(ROWS, 8, "u", feature_names=["c", "a"]),
    ]
    return EmbeddingCollection(tables, config=small_tiers([4, 8], SPEC, 60), optimizer=SPEC, **options)


def batch(seed: int = 0) -> KeyedJaggedTensor:
    return keyed_batch(seed, KEYS).ours


def expected(module: EmbeddingCollection, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
    tables = {"a@t": "t", "b": "t", "c": "u", "a@u": "u"}
    parts = {name: keyed[name.partition("@")[0]] for name in tables}
    return {name: module.rows(parts[name].values(), table) for name, table in tables.items()}


@pytest.mark.parametrize("order", [1, -1])
def test_every_part_is_that_of_its_feature(order: int) -> None:
    with collection(need_indices=True) as module:
        keyed = batch()
        found, rows = module(keyed), expected(module, keyed)
        assert type(found) is dict
        assert list(found) == ["a@t", "b", "c", "a@u"]
        for name in list(found)[::order]:
            part = keyed[name.partition("@")[0]]
            assert type(found[name]) is JaggedTensor
            assert torch.equal(found[name].lengths(), part.lengths())
            assert torch.equal(found[name].offsets(), part.offsets())
            assert torch.equal(found[name].weights(), part.values())
            assert torch.equal(found[name].values(), rows[name])
            assert found[name].values() is found[name].values()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_have_gradients_whatever_mode_first_asks_for_them(mode: Any) -> None:
    with collection() as module:
        keyed = batch()
        found, before = module(keyed), expected(module, keyed)
        with mode():
            assert torch.equal(found["b"].values(), before["b"])
        found["b"].values().sum().backward()
        ids = keyed["b"].values()
        counts = torch.bincount(ids, minlength=ROWS)[ids]
        assert torch.equal(module.rows(ids, "t"), before["b"] - 0.5 * counts.unsqueeze(1))


def test_rows_of_a_forward_call_without_gradients_have_none() -> None:
    with collection() as module:
        with torch.no_grad():
            found = module(batch())
        assert not found["a@t"].values().requires_grad
        with torch.inference_mode():
            found = module(batch())
        assert found["a@t"].values().is_inference()


def test_a_batch_that_changes_later_does_not_change_the_lengths() -> None:
    with collection() as module:
        keyed, other = batch(), batch(1)
        found, lengths = module(keyed), keyed["c"].lengths().clone()
        keyed._lengths, keyed._values = other.lengths(), other.values()
        keyed.unsync()
        assert torch.equal(found["c"].lengths(), lengths)


def test_trees_copies_and_files_have_the_parts() -> None:
    with collection() as module:
        with torch.no_grad():
            found = module(batch())
        for other in (
            pytree.tree_map(lambda part: part, module(batch())),
            copy.deepcopy(found),
            {name: copy.copy(part) for name, part in found.items()},
            _saved(found),
        ):
            for name, part in other.items():
                assert torch.equal(part.values(), found[name].values())
                assert torch.equal(part.lengths(), found[name].lengths())
                assert part.weights_or_none() is None
                assert repr(part) == repr(found[name])


def _saved(found: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_unknown_attributes_are_named() -> None:
    with collection() as module:
        found = module(batch())["b"]
        with pytest.raises(AttributeError, match="'JaggedTensor' object has no attribute '_nothing'"):
            _ = found._nothing  # type: ignore[attr-defined]
        assert not hasattr(JaggedTensor.__new__(JaggedTensor), "_values")


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_compiled_function_takes_what_an_eager_collection_returns(asked_before: bool) -> None:
    torch._dynamo.reset()
    with collection() as module, collection() as other:
        keyed = batch()
        found, same = module(keyed), other(keyed)
        if asked_before:
            found["b"].values()

        def loss(parts: dict[str, JaggedTensor]) -> Tensor:
            return parts["b"].values().sum() + (parts["c"].values() * parts["c"].lengths().sum()).sum()

        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        compiled(found).backward()
        loss(same).backward()
        for table in ("t", "u"):
            every = torch.arange(ROWS)
            assert torch.equal(module.rows(every, table), other.rows(every, table))
    torch._dynamo.reset()
