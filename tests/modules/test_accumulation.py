"""Several backward passes, one update: the bits of one batch with all examples, and torch's training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.modules.module_oracles import PAIRS, Pair, all_rows, load_all, small_tiers
from tierstore import KeyedJaggedTensor, PoolingType, optim
from tierstore.errors import ClosedError, ConfigError, GradientError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)
from tierstore.pipeline.prefetch import prefetch

ROWS, DIM, BAGS, PER_BAG = 40, 4, 12, 3
ONE = torch.tensor([[6]])
SPECS = [
    optim.SGD(lr=0.1, weight_decay=0.1),
    optim.RowWiseAdagrad(lr=0.1),
    optim.Adagrad(lr=0.1),
    optim.Adam(lr=0.1, weight_decay=0.1),
]


@dataclass
class Batch:
    """``ids`` and ``weights`` (bags, per bag), and the gradient of every output."""

    ids: Tensor
    weights: Tensor
    grads: Tensor

    def part(self, begin: int, end: int) -> Batch:
        return Batch(self.ids[begin:end], self.weights[begin:end], self.grads[begin:end])


def batch_of(seed: int, bags: int = BAGS, rows: int = ROWS) -> Batch:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (bags, PER_BAG), generator=random)
    return Batch(
        ids,
        torch.rand(bags, PER_BAG, generator=random),
        torch.randn(bags, PER_BAG, 3 * DIM, generator=random),
    )


@dataclass
class Case:
    """A module, and the sum of its outputs times given gradients."""

    make: Callable[..., Any]
    loss: Callable[[Any, Batch], Tensor]


def bag(mode: str, **more: Any) -> Case:
    return Case(
        lambda **options: TieredEmbeddingBag(ROWS, DIM, mode=mode, **more, **options),
        lambda module, batch: (module(batch.ids) * batch.grads[:, 0, :DIM]).sum(),
    )


def keyed(batch: Batch, weighted: bool) -> KeyedJaggedTensor:
    """Three features, of a column each: bags of one id, or of none for some ids of the first two."""
    kept = [batch.ids[:, 0] % 2 == 1, batch.ids[:, 1] > 5, batch.ids[:, 2] >= 0]
    values = torch.cat([batch.ids[kept[f], f] for f in range(3)])
    weights = torch.cat([batch.weights[kept[f], f] for f in range(3)]) if weighted else None
    lengths = torch.cat([mask.long() for mask in kept])
    return KeyedJaggedTensor.from_lengths_sync(["a", "b", "c"], values, lengths, weights)


def bags(weighted: bool, poolings: list[PoolingType]) -> Case:
    """Two features share a table; dims differ, so there are two row layouts."""
    tables = [
        EmbeddingBagConfig(ROWS, DIM, "t0", feature_names=["a", "c"], pooling=poolings[0]),
        EmbeddingBagConfig(ROWS, DIM + 3, "t1", feature_names=["b"], pooling=poolings[1]),
    ]

    def loss(module: Any, batch: Batch) -> Tensor:
        out = module(keyed(batch, weighted)).values()
        return (out * batch.grads.flatten(1)[:, : out.size(1)]).sum()

    return Case(lambda **options: EmbeddingBagCollection(tables, weighted, **options), loss)


def rows() -> Case:
    tables = [
        EmbeddingConfig(ROWS, DIM, "t0", feature_names=["a", "c"]),
        EmbeddingConfig(ROWS, DIM + 3, "t1", feature_names=["b"]),
    ]

    def loss(module: Any, batch: Batch) -> Tensor:
        found = module(keyed(batch, False))
        parts = []
        for at, name in enumerate("abc"):
            jagged = found[name]
            grads = batch.grads[:, at, : jagged.values().size(1)][jagged.lengths() > 0]
            parts.append((jagged.values() * grads).sum())
        return torch.stack(parts).sum()

    return Case(lambda **options: EmbeddingCollection(tables, **options), loss)


CASES: dict[str, Case] = {
    "sum": bag("sum"),
    "mean": bag("mean"),
    "max": bag("max"),
    "padding": bag("mean", padding_idx=3),
    "weights": Case(
        lambda **options: TieredEmbeddingBag(ROWS, DIM, mode="sum", **options),
        lambda module, batch: (module(batch.ids, None, batch.weights) * batch.grads[:, 0, :DIM]).sum(),
    ),
    "embedding": Case(
        lambda **options: TieredEmbedding(ROWS, DIM, padding_idx=7, **options),
        lambda module, batch: (module(batch.ids) * batch.grads[..., :DIM]).sum(),
    ),
    "bags": bags(False, [PoolingType.MAX, PoolingType.MEAN]),
    "weighted bags": bags(True, [PoolingType.SUM, PoolingType.MEAN]),
    "rows": rows(),
}


def everything(module: Any) -> list[Tensor]:
    found = []
    for table in module.table_names():
        name = None if len(module.table_names()) == 1 else table
        ids = torch.arange(ROWS)
        found += [module.rows(ids, name), *module.optimizer_rows(ids, name).values()]
    return found


def equal(one: Any, other: Any) -> None:
    for mine, theirs in zip(everything(one), everything(other), strict=True):
        assert torch.equal(mine, theirs)
    assert one.fused_optimizer.num_updates == other.fused_optimizer.num_updates


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


# -- torch's own training, in float64 ----------------------------------------------------


class Model(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(1)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table(ids).to(self.top.weight.dtype) - 0.3).square().sum() + self.top(
            self.table(ids.flip(0)).to(self.top.weight.dtype)
        ).square().sum()


def models(pair: Pair, **options: Any) -> tuple[Model, Model]:
    theirs = Model(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=pair.sparse)).double()
    bag = TieredEmbeddingBag(ROWS, DIM, mode="sum", optimizer=pair.spec, **options)
    load_all(bag, theirs.table.weight.float())
    return Model(bag), theirs


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


# -- GradScaler --------------------------------------------------------------------------


def scaler(scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def sum_loss(module: Any, ids: Tensor, factor: float = 1.0) -> Tensor:
    return (module(ids) * torch.linspace(-1, 1, DIM) * factor).sum()


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_scaled_step_has_the_bits_of_one_without(spec: optim.OptimizerSpec, unscaled_before: bool) -> None:
    with CASES["sum"].make(optimizer=spec) as ours, CASES["sum"].make(optimizer=spec) as plain:
        for seed in range(3):
            sum_loss(plain, batch_of(seed).ids).backward()
        amp = scaler(growth_interval=1)
        for seed in range(3):
            with tierstore.accumulate(ours) as kept:
                amp.scale(sum_loss(ours, batch_of(seed).ids)).backward()
                if unscaled_before:
                    amp.unscale_(kept)
                amp.step(kept)
                amp.update()
        equal(ours, plain)
        assert amp.get_scale() == 8 * 1024


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_step_is_skipped_where_the_scaler_skips(wrong: float, unscaled_before: bool) -> None:
    with CASES["sum"].make(optimizer=optim.Adam(lr=0.1)) as ours:
        before, amp = everything(ours), scaler()
        with tierstore.accumulate(ours) as kept:
            amp.scale(sum_loss(ours, batch_of(0).ids)).backward()
            amp.scale(sum_loss(ours, batch_of(1).ids[:1], wrong)).backward()
            if unscaled_before:
                amp.unscale_(kept)
            amp.step(kept)
            amp.update()
        assert amp.get_scale() == 512
        assert ours.fused_optimizer.num_updates == 0
        for mine, other in zip(everything(ours), before, strict=True):
            assert torch.equal(mine, other)


def test_scaling_clipping_and_accumulating_together() -> None:
    ours, theirs = models(PAIRS[0])
    optimizers = [
        torch.optim.SGD(ours.top.parameters(), lr=0.3),
        torch.optim.SGD(theirs.parameters(), lr=0.3),
    ]
    amp = scaler()
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with tierstore.accumulate(ours) as kept:
            for part in batch_of(step).ids.split(4):
                amp.scale(ours(part)).backward()
                theirs(part).backward()
            amp.unscale_(optimizers[0])
            amp.unscale_(kept)
            torch.nn.utils.clip_grad_norm_([*ours.parameters(), *kept.parameters()], 0.5)
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            amp.step(optimizers[0])
            amp.step(kept)
            amp.update()
        optimizers[1].step()
    torch.testing.assert_close(all_rows(ours.table, ROWS).double(), theirs.table.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.top.weight.double(), theirs.top.weight, rtol=1e-4, atol=1e-5)


def test_scaled_gradients_without_accumulate_are_refused_before_anything_moves() -> None:
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1)) as ours:
        sum_loss(ours, batch_of(0).ids).backward()  # none is in use yet
        before = everything(ours)
        unused, off = scaler(), scaler(enabled=False)
        off.scale(sum_loss(ours, batch_of(0).ids)).backward()
        ours.load_rows(torch.arange(ROWS), before[0])
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"with tierstore.accumulate\(model\) as rows"):
                unused.scale(sum_loss(ours, batch_of(0).ids)).backward()
        with pytest.raises(ConfigError, match=r"scaler.step\(rows\)"), tierstore.accumulate(ours):
            unused.scale(sum_loss(ours, batch_of(0).ids)).backward()  # and no scaler.step(rows)
        assert torch.equal(everything(ours)[0], before[0])
        assert ours.fused_optimizer.num_updates == 2
        ours.refuse_scaled = False  # the scaler is another model's
        sum_loss(ours, batch_of(0).ids).backward()
        ours.refuse_scaled = True
        unused = scaler()  # another object, and as many as before
        with pytest.raises(ConfigError, match="a GradScaler is in use"):
            unused.scale(sum_loss(ours, batch_of(0).ids)).backward()
        del unused
        sum_loss(ours, batch_of(0).ids).backward()
        assert ours.fused_optimizer.num_updates == 4


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
