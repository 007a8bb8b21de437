"""The collections against torchrec's unsharded ones: outputs, gradients of weights, rows after training."""

from __future__ import annotations

import pytest
import torch
import torchrec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.modules.keyed_batches import ROWS, bag_collections, keyed_batch, row_collections
from tests.modules.module_oracles import PAIRS, Pair, all_rows, close, scramble, small_tiers
from tierstore import optim
from tierstore.modules import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig

KEYS = ["f0", "f1", "f2", "f3"]
DENSE = [pair for pair in PAIRS if not pair.sparse]
SUM, MEAN = torchrec.PoolingType.SUM, torchrec.PoolingType.MEAN


def bag_tables(mixed: bool) -> list[torchrec.EmbeddingBagConfig]:
    """f1 is shared by two tables, t0 has two features, dims and poolings differ."""
    make = torchrec.EmbeddingBagConfig
    other = MEAN if mixed else SUM
    return [
        make(ROWS, 4, "t0", feature_names=["f3", "f1"], pooling=SUM),
        make(ROWS, 3, "t1", feature_names=["f0"], pooling=other),
        make(ROWS, 4, "t2", feature_names=["f1", "f2"], pooling=other),
    ]


def row_tables() -> list[torchrec.EmbeddingConfig]:
    make = torchrec.EmbeddingConfig
    return [
        make(ROWS, 4, "t0", feature_names=["f3", "f1"]),
        make(ROWS, 4, "t1", feature_names=["f0"]),
        make(ROWS, 4, "t2", feature_names=["f1", "f2"]),
    ]


def same_rows(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(other)
    for name in mine:
        close(mine[name], other[name])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from(DENSE),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_bag_training_agrees(
    seeds: list[int],
    size: int,
    pair: Pair,
    weighted: bool,
    deduplicated: bool,
    offsets: bool,
    dtype: torch.dtype,
) -> None:
    ours, theirs = bag_collections(bag_tables(mixed=not weighted), pair.spec, weighted)
    optimizer = pair.make(theirs.parameters())
    with ours:
        for seed in seeds:
            batch = keyed_batch(
                seed,
                KEYS,
                max(size, 1),
                weighted=weighted,
                deduplicated=deduplicated,
                offsets=offsets,
                dtype=dtype,
            )
            optimizer.zero_grad()
            mine, other = ours(batch.ours), theirs(batch.theirs)
            assert mine.keys() == other.keys() == ["f3", "f1@t0", "f0", "f1@t2", "f2"]
            assert mine.length_per_key() == other.length_per_key()
            close(mine.values(), other.values())
            scramble(mine.values()).backward()
            scramble(other.values()).backward()
            optimizer.step()
            if weighted and batch.ours.weights().numel():
                close(batch.ours.weights().grad, batch.theirs.weights().grad)
        same_rows(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from(DENSE),
    st.booleans(),
    st.booleans(),
)
def test_row_training_agrees(seeds: list[int], size: int, pair: Pair, indices: bool, offsets: bool) -> None:
    ours, theirs = row_collections(row_tables(), pair.spec, indices)
    optimizer = pair.make(theirs.parameters())
    with ours:
        for seed in seeds:
            batch = keyed_batch(seed, KEYS, size, offsets=offsets)
            optimizer.zero_grad()
            mine, other = ours(batch.ours), theirs(batch.theirs)
            assert list(mine) == list(other) == ["f3", "f1@t0", "f0", "f1@t2", "f2"]
            for name in mine:
                close(mine[name].values(), other[name].values())
                assert torch.equal(mine[name].lengths(), other[name].lengths())
                assert (mine[name].weights_or_none() is None) != indices
                if indices:
                    assert torch.equal(mine[name].weights(), other[name].weights())
            for side in (mine, other):
                sum(scramble(part.values()) for part in side.values()).backward()
            optimizer.step()
        same_rows(ours, theirs)


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_batch_of_either_library_is_taken(kind: str) -> None:
    ours, theirs = bag_collections(bag_tables(True), optim.SGD())
    batch = keyed_batch(3, [*KEYS, "unused"])
    with ours:
        close(ours(getattr(batch, kind)).values(), theirs(batch.theirs).values())
        assert ours.eval()(getattr(batch, kind)).keys() == ["f3", "f1@t0", "f0", "f1@t2", "f2"]


def test_keys_in_another_order_and_pieces_of_a_split() -> None:
    ours, theirs = bag_collections(bag_tables(True), optim.SGD())
    batch = keyed_batch(4, KEYS)
    expected = theirs(batch.theirs).values()
    with ours:
        close(ours(batch.ours.permute([2, 0, 3, 1])).values(), expected)
        pieces = batch.ours.split([1, 3])
        close(ours(type(batch.ours).concat([pieces[1], pieces[0]])).values(), expected)


def test_empty_batches_are_valid() -> None:
    ours, _ = bag_collections(bag_tables(True), optim.SGD())
    rows, _ = row_collections(row_tables(), optim.SGD())
    with ours, rows:
        for module in (ours, rows):
            before = module.state_dict()
            for size, dtype in ((0, torch.int64), (0, torch.int32)):
                batch = keyed_batch(0, KEYS, size, dtype=dtype).ours
                for training in (True, False):
                    out = module.train(training)(batch)
                    values = out.values() if module is ours else out["f0"].values()
                    assert values.shape == ((0, 19) if module is ours else (0, 4))
                    if training:
                        values.sum().backward()
            for name, weight in module.state_dict().items():
                assert torch.equal(weight, before[name])


def test_dims_of_an_embedding_collection_may_differ() -> None:
    tables = [
        EmbeddingConfig(ROWS, 3, "t0", feature_names=["f0", "f2"]),
        EmbeddingConfig(ROWS, 5, "t1", feature_names=["f1"]),
        EmbeddingConfig(ROWS, 3, "t2", feature_names=["f3"]),
    ]
    spec = optim.SGD(lr=1.0)
    batch = keyed_batch(8, KEYS)
    with EmbeddingCollection(tables, config=small_tiers([3, 5], spec), optimizer=spec) as module:
        before = {name: all_rows(module, ROWS, name) for name in ("t0", "t1", "t2")}
        out = module(batch.ours)
        assert list(out) == ["f0", "f2", "f1", "f3"]
        for feature, table in {"f0": "t0", "f2": "t0", "f1": "t1", "f3": "t2"}.items():
            ids = batch.ours[feature].values()
            assert torch.equal(out[feature].values(), before[table][ids])
        assert module.embedding_dim() == -1
        assert module.embedding_names_by_table() == [["f0", "f2"], ["f1"], ["f3"]]
        (out["f1"].values().sum() + 2 * out["f3"].values().sum()).backward()
        for feature, table, scale in (("f1", "t1", 1.0), ("f3", "t2", 2.0)):
            counts = torch.bincount(batch.ours[feature].values(), minlength=ROWS).unsqueeze(1)
            close(all_rows(module, ROWS, table), before[table] - scale * counts)
        assert torch.equal(all_rows(module, ROWS, "t0"), before["t0"])


def test_max_pooling_beside_others() -> None:
    from tierstore.modules import EmbeddingBagConfig, PoolingType

    tables = [
        EmbeddingBagConfig(ROWS, 3, "t0", feature_names=["f0"], pooling=PoolingType.MAX),
        EmbeddingBagConfig(ROWS, 3, "t1", feature_names=["f1"], pooling=PoolingType.MEAN),
    ]
    spec = optim.SGD(lr=1.0)
    batch = keyed_batch(9, KEYS[:2], 6)
    with EmbeddingBagCollection(tables, config=small_tiers([3], spec), optimizer=spec) as module:
        dense = {
            name: torch.nn.EmbeddingBag(
                ROWS, 3, mode=mode, _weight=all_rows(module, ROWS, name), include_last_offset=True
            )
            for name, mode in (("t0", "max"), ("t1", "mean"))
        }
        out = module(batch.ours)
        for feature, name in (("f0", "t0"), ("f1", "t1")):
            part = batch.ours[feature]
            expected = dense[name](part.values(), part.offsets().long())
            close(out[feature], expected)
            scramble(expected).backward()
        (scramble(out["f0"]) + scramble(out["f1"])).backward()
        for name, other in dense.items():
            close(all_rows(module, ROWS, name), other.weight - other.weight.grad)


def test_what_collections_say_of_themselves() -> None:
    ours, theirs = bag_collections(bag_tables(True), optim.SGD())
    rows, their_rows = row_collections(row_tables(), optim.SGD(), True)
    with ours, rows:
        assert ours.is_weighted() == theirs.is_weighted()
        assert [c.name for c in ours.embedding_bag_configs()] == ["t0", "t1", "t2"]
        assert rows.embedding_dim() == their_rows.embedding_dim() == 4
        assert rows.need_indices()
        assert rows.embedding_names_by_table() == their_rows.embedding_names_by_table()
        assert [c.feature_names for c in rows.embedding_configs()] == [["f3", "f1"], ["f0"], ["f1", "f2"]]
        assert ours.device == theirs.device
        shown = [name.replace("tiered_weight", "weight") for name, _ in ours.named_parameters()]
        assert shown == [name for name, _ in theirs.named_parameters()]
        assert sum(parameter.numel() for parameter in ours.parameters()) == 0
