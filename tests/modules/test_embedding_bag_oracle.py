"""TieredEmbeddingBag against torch.nn.EmbeddingBag: outputs, gradients of weights, rows after training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.modules.module_oracles import PAIRS, Pair, all_rows, close, load_all, scramble, small_tiers
from tierstore.modules import TieredEmbeddingBag

ROWS = 120


@st.composite
def bag_inputs(draw: st.DrawFn, include_last_offset: bool, weighted: bool) -> tuple[tuple[Any, ...], ...]:
    """Arguments of a few forward calls; some batches have no bags, some bags no ids."""
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([torch.int64, torch.int32]))
        seed = draw(st.integers(0, 2**20))
        random = torch.Generator().manual_seed(seed)
        offsets = None
        if draw(st.booleans()):
            shape = (draw(st.integers(1, 6)), draw(st.integers(1, 5)))
            ids = torch.randint(0, ROWS, shape, generator=random, dtype=dtype)
        else:
            lengths = torch.tensor(draw(st.lists(st.integers(0, 5), max_size=6)), dtype=dtype)
            ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random, dtype=dtype)
            offsets = torch.cat([torch.zeros(1, dtype=dtype), lengths.cumsum(0).to(dtype)])
            offsets = offsets if include_last_offset else offsets[:-1]
        weights = torch.rand(ids.shape, generator=random) - 0.5 if weighted else None
        calls.append((ids, offsets, weights))
    return tuple(calls)


def pair_of(
    mode: str, dim: int, pair: Pair, last: bool, padding: int | None
) -> tuple[TieredEmbeddingBag, nn.EmbeddingBag]:
    options: dict[str, Any] = {"mode": mode, "include_last_offset": last, "padding_idx": padding}
    ours = TieredEmbeddingBag(ROWS, dim, **options, config=small_tiers([dim], pair.spec), optimizer=pair.spec)
    theirs = nn.EmbeddingBag(ROWS, dim, sparse=pair.sparse, **options)
    load_all(ours, theirs.weight)
    return ours, theirs


@settings(max_examples=80, deadline=None)
@given(
    st.data(),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from(PAIRS),
    st.sampled_from([1, 3, 8, 17]),
    st.booleans(),
    st.sampled_from([None, 0, 7, -1]),
)
def test_training_agrees(
    data: st.DataObject, mode: str, pair: Pair, dim: int, last: bool, padding: int | None
) -> None:
    if mode == "max" and pair.sparse:
        mode = "sum"  # torch has no sparse gradients of max
    weighted = mode == "sum" and data.draw(st.booleans())
    ours, theirs = pair_of(mode, dim, pair, last, padding)
    with ours:
        optimizer = pair.make(theirs.parameters())
        for ids, offsets, weights in data.draw(bag_inputs(last, weighted)):
            sides = []
            for module in (ours, theirs):
                own = None if weights is None else weights.clone().requires_grad_()
                out = module(ids, offsets, own)
                optimizer.zero_grad()
                scramble(out).backward()
                sides.append((out, None if own is None else own.grad))
            assert sides[0][0].shape == sides[1][0].shape
            close(sides[0][0], sides[1][0])
            if ids.numel():
                close(sides[0][1], sides[1][1])
            optimizer.step()
        close(all_rows(ours, ROWS), theirs.weight)
        for name, part in ours.optimizer_rows(torch.arange(ROWS)).items():
            state = optimizer.state[theirs.weight]
            if name in state:
                close(part, state[name])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_eval_and_no_grad_read_without_a_trace(mode: str) -> None:
    ours, theirs = pair_of(mode, 4, PAIRS[0], False, None)
    ids, offsets = torch.tensor([3, 50, 119, 3]), torch.tensor([0, 1, 1])
    with ours:
        before, counted = all_rows(ours, ROWS), ours.stats()
        out = ours.eval()(ids, offsets)
        close(out, theirs(ids, offsets))
        assert not out.requires_grad
        with torch.no_grad():
            close(ours.train()(ids, offsets), theirs(ids, offsets))
        assert torch.equal(all_rows(ours, ROWS), before)
        assert ours.stats()["lookups"] == counted["lookups"]
        assert ours.stats()["evicted_rows"] == counted["evicted_rows"]


def test_weights_have_gradients_of_frozen_rows_and_in_eval() -> None:
    pair = PAIRS[0]
    frozen = TieredEmbeddingBag(ROWS, 4, mode="sum", config=small_tiers([4], pair.spec), optimizer=None)
    theirs = nn.EmbeddingBag(ROWS, 4, mode="sum")
    load_all(frozen, theirs.weight)
    trained, _ = pair_of("sum", 4, pair, False, None)
    load_all(trained, theirs.weight)
    ids = torch.tensor([[1, 2, 3], [3, 3, 9]])
    expected = torch.rand(2, 3, requires_grad=True)
    scramble(theirs(ids, per_sample_weights=expected)).backward()
    for module in (frozen, trained.eval()):
        with module:
            weights = expected.detach().clone().requires_grad_()
            scramble(module(ids, per_sample_weights=weights)).backward()
            close(weights.grad, expected.grad)
            close(all_rows(module, ROWS), theirs.weight)


def test_weight_gradients_are_those_of_the_rows_at_forward() -> None:
    """Two lookups in one step: the backward pass of one updates rows before that of the other."""
    ours, theirs = pair_of("sum", 4, PAIRS[0], False, None)
    ids = torch.tensor([[1, 2, 3], [3, 3, 9]])
    weights = [torch.full((2, 3), 0.5, requires_grad=True) for _ in range(4)]
    with ours:
        (scramble(ours(ids, None, weights[0])) + 2 * scramble(ours(ids, None, weights[1]))).backward()
        (scramble(theirs(ids, None, weights[2])) + 2 * scramble(theirs(ids, None, weights[3]))).backward()
        for mine, other in zip(weights[:2], weights[2:], strict=True):
            close(mine.grad, other.grad)


def test_gradients_of_the_weights_alone_do_not_train_the_rows() -> None:
    ours, theirs = pair_of("sum", 4, PAIRS[0], False, None)
    ids = torch.tensor([[1, 2, 3], [3, 3, 9]])
    mine, other = (torch.full((2, 3), 0.5, requires_grad=True) for _ in range(2))
    with ours:
        loss = scramble(ours(ids, None, mine))
        (grad,) = torch.autograd.grad(loss, [mine], retain_graph=True)
        close(grad, torch.autograd.grad(scramble(theirs(ids, None, other)), [other])[0])
        close(all_rows(ours, ROWS), theirs.weight)
        assert ours.fused_optimizer.num_updates == 0
        loss.backward()
        assert ours.fused_optimizer.num_updates == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_are_refused_not_zero(frozen: bool) -> None:
    """Those of the weights would go through the rows, of which autograd knows nothing."""
    ours, _ = pair_of("sum", 4, PAIRS[0], False, None)
    weights = torch.full((2, 3), 0.5, requires_grad=True)
    with ours.train(not frozen):
        loss = scramble(ours(torch.tensor([[1, 2, 3], [3, 3, 9]]), None, weights))
        (grad,) = torch.autograd.grad(loss, [weights], create_graph=True)
        for derive in (
            lambda: grad.square().sum().backward(retain_graph=True),
            lambda: torch.autograd.grad(grad.sum(), [weights], allow_unused=True),
        ):
            with pytest.raises(RuntimeError, match="cannot differentiate a lookup twice"):
                derive()


def test_half_precision_weights_keep_their_dtype() -> None:
    ours, theirs = pair_of("sum", 4, PAIRS[0], False, None)
    weights = torch.rand(2, 2, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[1, 2], [3, 3]])
    with ours:
        out = ours(ids, per_sample_weights=weights)
        close(out, theirs(ids, per_sample_weights=weights.detach().float()))
        out.sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float64


def test_gradients_that_are_not_contiguous() -> None:
    ours, theirs = pair_of("mean", 6, PAIRS[0], False, None)
    optimizer = PAIRS[0].make(theirs.parameters())
    ids = torch.randint(0, ROWS, (4, 3))
    with ours:
        for module in (ours, theirs):
            (module(ids).t() * torch.arange(24.0).view(6, 4)).sum().backward()
        optimizer.step()
        close(all_rows(ours, ROWS), theirs.weight)


def test_a_graph_that_is_kept_is_updated_again_and_another_is_refused() -> None:
    ours, theirs = pair_of("sum", 4, PAIRS[0], False, None)
    ids = torch.tensor([[1, 2], [3, 3]])
    with ours:
        loss = ours(ids).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        theirs(ids).sum().backward()
        with torch.no_grad():
            theirs.weight -= 2 * 0.3 * theirs.weight.grad
        close(all_rows(ours, ROWS), theirs.weight)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        weights = torch.ones(2, 2, requires_grad=True)
        out = ours(ids, per_sample_weights=weights * 1.0)
        changed = weights * 1.0
        out = ours(ids, per_sample_weights=changed)
        changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
