"""Several backward passes, one update: the bits of one batch with all examples, and torch's training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.modules.accumulated_cases import (
    BAGS,
    CASES,
    DIM,
    ONE,
    ROWS,
    SPECS,
    batch_of,
    equal,
    everything,
    models,
    sum_loss,
)
from tests.modules.module_oracles import PAIRS, Pair, all_rows, small_tiers
from tierstore import optim
from tierstore.errors import ClosedError, ConfigError, GradientError
from tierstore.pipeline.prefetch import prefetch


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("name", CASES)
def test_passes_have_the_bits_of_one_batch(name: str, spec: optim.OptimizerSpec) -> None:
    case = CASES[name]
    tiers = small_tiers([DIM, DIM + 3], spec, slots=18)
    with case.make(optimizer=spec, config=tiers) as ours, case.make(optimizer=spec) as whole:
        for seed in range(3):
            batch = batch_of(seed, rows=9 if seed else ROWS)  # rows that many features and passes share
            case.loss(whole, batch).backward()
            before = everything(ours)
            with tierstore.accumulate(ours) as kept:
                for begin, end in ((0, 5), (5, 6), (6, 6), (6, BAGS)):
                    case.loss(ours, batch.part(begin, end)).backward()
                assert kept.kept_bytes > 0
                if name not in ("bags", "weighted bags", "rows"):
                    assert torch.equal(everything(ours)[0], before[0])
            equal(ours, whole)


def test_rows_of_many_positions_have_the_bits_of_one_batch() -> None:
    """Their sums are made in pieces of 1,024 positions, which do not end where a pass does."""
    case, spec = CASES["sum"], optim.Adagrad(lr=0.1)
    with case.make(optimizer=spec) as ours, case.make(optimizer=spec) as whole:
        batch = batch_of(0, bags=1500, rows=2)
        case.loss(whole, batch).backward()
        with tierstore.accumulate(ours):
            for begin in range(0, 1500, 300):
                case.loss(ours, batch.part(begin, begin + 300)).backward()
        equal(ours, whole)


def test_passes_with_and_without_weights_together() -> None:
    case, spec = CASES["weights"], optim.Adagrad(lr=0.1)
    with case.make(optimizer=spec) as ours, case.make(optimizer=spec) as whole:
        batch = batch_of(0)
        batch.weights[:6] = 1
        case.loss(whole, batch).backward()
        with tierstore.accumulate(ours):
            CASES["sum"].loss(ours, batch.part(0, 6)).backward()
            case.loss(ours, batch.part(6, BAGS)).backward()
        equal(ours, whole)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_training_is_that_of_torch(pair: Pair) -> None:
    """The table is looked up twice in each pass; torch's float64 table has the sum of all gradients."""
    ours, theirs = models(pair, config=small_tiers([DIM], pair.spec, slots=18))
    theirs_optimizer = pair.make([theirs.table.weight])
    with ours.table:  # type: ignore[attr-defined]
        for step in range(3):
            theirs_optimizer.zero_grad()
            with tierstore.accumulate(ours):
                for part in batch_of(step).ids.split(4):
                    (ours(part) / 3).backward()
                    (theirs(part) / 3).backward()
            theirs_optimizer.step()
        torch.testing.assert_close(
            all_rows(ours.table, ROWS).double(), theirs.table.weight, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_the_global_norm_includes_the_rows(most: float) -> None:
    pair = PAIRS[0]
    ours, theirs = models(pair)
    optimizers = [
        torch.optim.SGD(ours.top.parameters(), lr=0.3),
        torch.optim.SGD(theirs.parameters(), lr=0.3),
    ]
    with ours.table:  # type: ignore[attr-defined]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with tierstore.accumulate(ours) as kept:
                for part in batch_of(step).ids.split(4):
                    ours(part).backward()
                    theirs(part).backward()
                norms = [
                    torch.nn.utils.clip_grad_norm_([*ours.parameters(), *kept.parameters()], most),
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), most),
                ]
                torch.testing.assert_close(norms[0].double(), norms[1], rtol=1e-5, atol=0)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(
            all_rows(ours.table, ROWS).double(), theirs.table.weight, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(ours.top.weight.double(), theirs.top.weight, rtol=1e-4, atol=1e-5)


def test_looking_at_norms_changes_nothing() -> None:
    """Rows whose gradient is NaN are theirs alone, also when the norm of all was asked for."""
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1)) as ours:
        before = all_rows(ours, ROWS)
        with tierstore.accumulate(ours) as kept:
            sum_loss(ours, torch.tensor([[5]]), float("nan")).backward()
            sum_loss(ours, ONE).backward()
            assert kept.parameters()[0].grad.isnan().all()
        after = all_rows(ours, ROWS)
        torch.testing.assert_close(after[6], before[6] - 0.1 * torch.linspace(-1, 1, DIM))
        assert after[5].isnan().all()
        assert torch.equal(after[7:], before[7:])


def of_sgd(name: str) -> Any:
    return CASES[name].make(optimizer=optim.SGD(lr=0.1))


def clip_values(kept: Any) -> None:
    torch.nn.utils.clip_grad_value_(kept.parameters(), 1e-3)


def add_to_one(kept: Any) -> None:
    kept.parameters()[1].grad.add_(1.0)


@pytest.mark.parametrize("change", [clip_values, add_to_one])
def test_norms_change_by_a_factor_alone(change: Callable[[Any], None]) -> None:
    with of_sgd("sum") as one, of_sgd("mean") as other, tierstore.accumulate([one, other]) as kept:
        before = [*everything(one), *everything(other)]
        for module in (one, other):
            sum_loss(module, batch_of(0).ids).backward()
        change(kept)
        with pytest.raises(ConfigError, match="clip_grad_norm_"):
            kept.step()
        assert all(map(torch.equal, [*everything(one), *everything(other)], before))


# -- what users do in the block ----------------------------------------------------------


def fill(module: Any, *losses: Callable[[], Tensor], then: Callable[[], Any] = lambda: None) -> None:
    """Accumulates the gradients of these losses."""
    with tierstore.accumulate(module):
        for loss in losses:
            loss().backward()
        then()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_exception_drops_what_is_kept() -> None:
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1)) as ours:
        before = everything(ours)
        with pytest.raises(KeyboardInterrupt):
            fill(ours, lambda: sum_loss(ours, batch_of(0).ids), then=interrupt)
        assert torch.equal(everything(ours)[0], before[0])
        sum_loss(ours, batch_of(0).ids).backward()
        assert ours.fused_optimizer.num_updates == 1


def test_a_module_that_cannot_be_updated_leaves_the_others_as_they_are() -> None:
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1)) as good, CASES["sum"].make() as bad:
        before = everything(good)
        for wrong in (bad, good):
            good.fused_optimizer.param_groups[0]["lr"] = 0.1 if wrong is bad else None
            losses = [partial(sum_loss, module, ONE) for module in (good, wrong)]
            with pytest.raises(ConfigError, match=r"without an optimizer|lr is None"):
                fill([good, bad], *losses)
            assert torch.equal(everything(good)[0], before[0])
            assert good.fused_optimizer.num_updates == 0


def test_steps_and_zero_grad_in_the_block() -> None:
    spec = optim.Adagrad(lr=0.1)
    with CASES["sum"].make(optimizer=spec) as ours, CASES["sum"].make(optimizer=spec) as plain:
        for seed in (1, 2):
            sum_loss(plain, batch_of(seed).ids).backward()
        with tierstore.accumulate(ours) as kept:
            sum_loss(ours, batch_of(0).ids).backward()
            kept.zero_grad()
            kept.step()
            assert kept.kept_bytes == 0
            sum_loss(ours, batch_of(1).ids).backward()
            kept.step()
            assert kept.step(lambda: sum_loss(ours, batch_of(2).ids).backward()) is None
            kept.step()
        with tierstore.accumulate(ours):
            pass
        equal(ours, plain)


def test_blocks_are_not_nested() -> None:
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1)) as ours, tierstore.accumulate([ours]):
        with (
            pytest.raises(ConfigError, match="accumulated already"),
            tierstore.accumulate(nn.Sequential(ours)),
        ):
            pass
        sum_loss(ours, batch_of(0).ids).backward()
        assert ours.fused_optimizer.num_updates == 0
    with pytest.raises(ConfigError, match="no tiered module"), tierstore.accumulate(nn.Linear(1, 1)):
        pass


def test_what_is_kept_does_not_change_with_the_users_tensors() -> None:
    case = CASES["weights"]
    with case.make(optimizer=optim.SGD(lr=0.1)) as ours, case.make(optimizer=optim.SGD(lr=0.1)) as plain:
        batch = batch_of(0)
        plain(batch.ids, None, batch.weights).backward(batch.grads[:, 0, :DIM])
        with tierstore.accumulate(ours):
            grad = batch.grads[:, 0, :DIM].clone()
            ours(batch.ids, None, batch.weights).backward(grad)
            for tensor in (grad, batch.weights, batch.ids):
                tensor.zero_()
        equal(ours, plain)


def test_graphs_that_are_kept_frozen_modules_and_gradients_of_weights_alone() -> None:
    case, spec = CASES["weights"], optim.SGD(lr=0.1)
    with (
        case.make(optimizer=spec) as ours,
        case.make(optimizer=spec) as plain,
        case.make(optimizer=spec) as other,
    ):
        batch = batch_of(0)
        frozen = everything(other)
        for _ in range(2):
            (case.loss(plain, batch) / 2).backward()
        with tierstore.accumulate([ours, other]):
            other.requires_grad_(False)
            batch.weights.requires_grad_()
            loss = (case.loss(ours, batch) + case.loss(other, batch)) / 2
            torch.autograd.grad(loss, [batch.weights], retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        assert torch.equal(everything(other)[0], frozen[0])
        torch.testing.assert_close(everything(ours), everything(plain))
        assert (ours.fused_optimizer.num_updates, other.fused_optimizer.num_updates) == (1, 0)


def test_accumulating_in_a_prefetch_loop() -> None:
    spec = optim.Adam(lr=0.1)
    tiers = small_tiers([DIM], spec, slots=18, policy="lookahead")
    batches = [batch_of(seed).ids for seed in range(12)]
    with CASES["sum"].make(optimizer=spec, config=tiers) as ours, CASES["sum"].make(optimizer=spec) as plain:
        loop = iter(prefetch(batches, ours, depth=2, window=3))
        for _ in range(3):
            with tierstore.accumulate(ours):
                for _ in range(4):
                    sum_loss(ours, next(loop)).backward()
        assert next(loop, None) is None
        for group in range(3):
            with tierstore.accumulate(plain):
                for ids in batches[4 * group : 4 * group + 4]:
                    sum_loss(plain, ids).backward()
        equal(ours, plain)


def test_tables_closed_in_the_block_and_gradients_that_are_not_finite_are_named() -> None:
    ours = CASES["sum"].make(optimizer=optim.SGD(lr=0.1))
    with pytest.raises(ClosedError):
        fill(ours, lambda: sum_loss(ours, batch_of(0).ids), then=ours.close)
    checked = tierstore.TierConfig(hbm="all", check_gradients=True)
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1), config=checked) as ours:
        losses = [partial(sum_loss, ours, torch.tensor([[5]]), float("nan")), partial(sum_loss, ours, ONE)]
        with pytest.raises(GradientError, match="embedding id 5"):
            fill(ours, *losses)
        assert ours.accumulation is None
        assert ours.rows([5]).isfinite().all()
