"""TieredEmbedding against torch.nn.Embedding: outputs, rows after training, padding."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.modules.module_oracles import PAIRS, Pair, all_rows, close, load_all, scramble, small_tiers
from tierstore import initializers, optim
from tierstore.errors import InputError
from tierstore.modules import TieredEmbedding, TieredEmbeddingBag

ROWS = 120
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def pair_of(dim: int, pair: Pair, padding: int | None = None) -> tuple[TieredEmbedding, nn.Embedding]:
    config = small_tiers([dim], pair.spec)
    ours = TieredEmbedding(ROWS, dim, padding, config=config, optimizer=pair.spec)
    theirs = nn.Embedding(ROWS, dim, padding, sparse=pair.sparse)
    load_all(ours, theirs.weight)
    return ours, theirs


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.integers(0, 2**20),
            st.sampled_from([torch.int64, torch.int32]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(PAIRS),
    st.sampled_from([1, 3, 8, 17]),
    st.sampled_from([None, 0, 7, -1]),
)
def test_training_agrees(calls: list, pair: Pair, dim: int, padding: int | None) -> None:
    ours, theirs = pair_of(dim, pair, padding)
    optimizer = pair.make(theirs.parameters())
    with ours:
        for shape, seed, dtype in calls:
            random = torch.Generator().manual_seed(seed)
            if pair.sparse:  # torch's sparse gradients fail for a single id without a dimension
                shape = shape or [1]
            ids = torch.randint(0, ROWS, tuple(shape), generator=random, dtype=dtype)
            outs = []
            for module in (ours, theirs):
                out = module(ids)
                optimizer.zero_grad()
                scramble(out).backward()
                outs.append(out)
            assert outs[0].shape == outs[1].shape
            close(*outs)
            optimizer.step()
        close(all_rows(ours, ROWS), theirs.weight)


def test_the_padding_row_is_zero_until_it_is_loaded_and_never_trained() -> None:
    ours, theirs = pair_of(3, PAIRS[0], 5)
    fresh = TieredEmbedding(ROWS, 3, 5, config=small_tiers([3], optim.SGD()))
    ids = torch.tensor([5, 6, 5])
    with ours, fresh:
        assert fresh(ids)[0].tolist() == [0, 0, 0]
        assert fresh.rows([5]).tolist() == [[0, 0, 0]]
        row = torch.tensor([[1.0, 2.0, 3.0]])
        ours.load_rows([5], row)
        with torch.no_grad():
            theirs.weight[5] = row
        for mode in (True, False):
            close(ours.train(mode)(ids), theirs.train(mode)(ids))
        ours.train()(ids).sum().backward()
        assert ours.rows([5]).tolist() == row.tolist()
        assert not torch.equal(ours.rows([6]), theirs.weight[6:7])


def test_from_pretrained_has_torchs_arguments() -> None:
    weight = torch.rand(ROWS, 4)
    options = {"config": small_tiers([4], optim.SGD())}
    ids = torch.tensor([[3, 5, 5], [9, 3, 0]])
    for ours, theirs in ((TieredEmbedding, nn.Embedding), (TieredEmbeddingBag, nn.EmbeddingBag)):
        expected = list(inspect.signature(theirs.from_pretrained).parameters)
        assert list(inspect.signature(ours.from_pretrained).parameters)[:-1] == expected
        constructor = inspect.signature(theirs).parameters
        for (name, mine), other in zip(
            inspect.signature(ours).parameters.items(), constructor.values(), strict=False
        ):
            assert (name, mine.default, mine.kind) == (other.name, other.default, other.kind)
        for freeze in (True, False):
            with ours.from_pretrained(weight, freeze, padding_idx=5, **options) as module:
                close(module(ids), theirs.from_pretrained(weight, freeze, padding_idx=5)(ids))
                assert module.frozen == freeze
    with pytest.raises(InputError, match="two dimensions"):
        TieredEmbedding.from_pretrained(torch.rand(3))


def test_initial_values_and_weight_arguments() -> None:
    weight = torch.rand(ROWS, 4)
    options = {"config": small_tiers([4], optim.SGD())}
    with TieredEmbedding(ROWS, 4, _weight=weight, _freeze=True, **options) as given_rows:
        assert torch.equal(all_rows(given_rows, ROWS), weight)
        assert given_rows.frozen
        assert not given_rows(torch.tensor([1])).requires_grad
    with TieredEmbedding(ROWS, 4, init=initializers.uniform(2.0, 3.0), **options) as uniform:
        rows = all_rows(uniform, ROWS)
        assert (rows >= 2).all()
        assert (rows < 3).all()
    with (
        TieredEmbedding(ROWS, 4, **options) as one,
        TieredEmbedding(ROWS, 4, **options) as same,
        TieredEmbedding(ROWS, 4, seed=1, **options) as seeded,
        TieredEmbedding(ROWS, 4, name="other", **options) as named,
    ):
        rows = all_rows(one, ROWS)
        assert torch.equal(all_rows(same, ROWS), rows)
        assert not torch.equal(all_rows(seeded, ROWS), rows)
        assert not torch.equal(all_rows(named, ROWS), rows)
        assert abs(float(rows.mean())) < 0.2
        assert float(rows.std()) == pytest.approx(1, abs=0.1)
