"""Hooks on the gradients of rows, and clipping by row: torch in float64, tiers, and what users get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import scramble
from tierstore import (
    ConfigError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    GradientError,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    optim,
)
from tierstore.modules.configs import DataType, PoolingType

KEYS = ["f0", "f1", "f2"]
FEATURES = {"a": ["f0", "f2"], "b": ["f1"]}
IDS = torch.arange(ROWS)
MEMORY = TierConfig(hbm="all")
ADAGRAD = optim.RowWiseAdagrad(lr=0.1)


def bags(optimizer: Any = ADAGRAD, config: TierConfig = MEMORY, **changes: Any) -> Any:
    tables = [
        EmbeddingBagConfig(ROWS, 6, n, feature_names=f, pooling=PoolingType.MEAN, **changes)
        for n, f in FEATURES.items()
    ]
    return EmbeddingBagCollection(tables, config=config, optimizer=optimizer, seed=4)


def train(module: Any, seeds: range = range(3)) -> None:
    for seed in seeds:
        scramble(module(keyed_batch(seed, KEYS, 5).ours).values()).backward()


def everything(module: Any) -> list[Tensor]:
    found = []
    for name in FEATURES:
        found += [module.rows(IDS, name), *module.optimizer_rows(IDS, name).values()]
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def seen_by(module: Any, table: str | None = None) -> list[tuple[Tensor, Tensor]]:
    """What a hook gets that changes nothing."""
    found: list[tuple[Tensor, Tensor]] = []
    module.register_gradient_hook(lambda ids, grads: found.append((ids.clone(), grads.clone())), table)
    return found


@pytest.mark.parametrize("optimizer", [ADAGRAD, optim.Adam(lr=0.1), optim.LAMB()], ids=lambda o: o.name)
@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.BF16], ids=str)
def test_a_hook_that_changes_nothing_changes_no_bit(optimizer: Any, dtype: DataType) -> None:
    config = TierConfig(hbm="all", stochastic_rounding=True)
    expected, found = bags(optimizer, config, data_type=dtype), bags(optimizer, config, data_type=dtype)
    seen = seen_by(found, "a")
    train(expected)
    train(found)
    assert len(seen) == 3
    same(everything(found), everything(expected))


def test_what_a_hook_gets() -> None:
    """The sums of the gradients of each row, in float64 by torch."""
    module = bags(optim.SGD(lr=0.1))
    seen = {name: seen_by(module, name) for name in FEATURES}
    dense = {n: torch.nn.Parameter(module.rows(IDS, n).double()) for n in FEATURES}
    batch = keyed_batch(1, KEYS, 5).ours
    parts = []
    for key, jagged in batch.to_dict().items():
        table = dense["b" if key == "f1" else "a"]
        offsets = jagged.offsets()[:-1]
        parts.append(torch.nn.functional.embedding_bag(jagged.values(), table, offsets, mode="mean"))
    order = [parts[0], parts[2], parts[1]]  # as the collection's features are
    scramble(module(batch).values()).backward()
    scramble(torch.cat(order, dim=1)).backward()
    for name, ((ids, grads),) in seen.items():
        assert ids.dtype == torch.int64
        expected = dense[name].grad
        assert expected is not None
        assert set(ids.tolist()) == set(expected.abs().sum(dim=1).nonzero().view(-1).tolist())
        torch.testing.assert_close(grads.double(), expected[ids], rtol=1e-5, atol=1e-6)


def test_a_hook_replaces_gradients_of_its_table_alone() -> None:
    module = bags(optim.SGD(lr=1.0))
    touched: list[Tensor] = []

    def ones(ids: Tensor, grads: Tensor) -> Tensor:
        touched.append(ids)
        return torch.ones_like(grads, dtype=torch.float64)

    module.embedding_bags["b"].register_gradient_hook(ones)
    reference = bags(optim.SGD(lr=1.0))
    before = module.rows(IDS, "b")
    train(module, range(1))
    train(reference, range(1))
    (ids,) = touched
    expected = before.clone()
    expected[ids] -= 1.0
    assert torch.equal(module.rows(IDS, "b"), expected)
    assert torch.equal(module.rows(IDS, "a"), reference.rows(IDS, "a"))


def test_hooks_run_in_their_order_and_are_removed() -> None:
    module = TieredEmbedding(9, 2, config=MEMORY, optimizer=optim.SGD(lr=1.0))
    before = module.rows(torch.arange(9))
    first = module.register_gradient_hook(lambda ids, grads: grads + 1.0)

    def double(ids: Tensor, grads: Tensor) -> None:
        grads *= 2.0  # in place

    module.register_gradient_hook(double)
    module(torch.tensor([3, 3])).sum().backward()
    assert torch.allclose(module.rows([3]), before[3] - 6.0)
    first.remove()
    module(torch.tensor([4])).sum().backward()
    assert torch.allclose(module.rows([4]), before[4] - 2.0)


def test_hooks_that_were_taken_over_survive_another_optimizer() -> None:
    """Tables that are not open yet may get their optimizer later."""
    first, module = bags(), bags(optim.SGD(lr=1.0))
    seen = seen_by(first, "b")
    module.take_gradient_hooks(first)
    module.use_optimizer(optim.SGD(lr=0.5))
    train(module, range(1))
    assert len(seen) == 1


def test_hot_rows_and_padding() -> None:
    bag = TieredEmbeddingBag(9, 3, mode="sum", padding_idx=0, config=MEMORY, optimizer=optim.SGD(lr=1.0))
    seen = seen_by(bag)
    bag(torch.tensor([[0, 5, 5]] * 300)).sum().backward()
    ((ids, grads),) = seen
    assert ids.tolist() == [5]
    assert grads.tolist() == [[600.0] * 3]


def test_tiers_prefetch_and_rows_one_by_one() -> None:
    def train_one(config: TierConfig, prefetched: bool) -> list[Tensor]:
        tables = [EmbeddingConfig(ROWS, 6, n, feature_names=f) for n, f in FEATURES.items()]
        with EmbeddingCollection(tables, config=config, optimizer=optim.Adam(lr=0.1), seed=4) as module:
            module.register_gradient_hook(lambda ids, grads: grads * (ids % 3).unsqueeze(1), "a")
            batches = [keyed_batch(seed, KEYS, 4).ours for seed in range(4)]
            for batch in tierstore.prefetch(batches, module, depth=2) if prefetched else batches:
                torch.stack([scramble(p.values()) for p in module(batch).values()]).sum().backward()
            return everything(module)

    tiers = TierConfig(hbm="8KiB", ssd="1GiB", engine="memory", policy="lru")
    same(train_one(tiers, True), train_one(MEMORY, False))


def test_accumulated_passes_call_a_hook_once_after_the_scale() -> None:
    module = TieredEmbedding(9, 2, config=MEMORY, optimizer=optim.SGD(lr=1.0))
    seen = seen_by(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with tierstore.accumulate(module) as rows:
        for ids in ([1, 2], [2]):
            scaler.scale(module(torch.tensor(ids)).sum()).backward()
        scaler.step(rows)
        scaler.update()
    del scaler
    ((ids, grads),) = seen
    assert ids.tolist() == [1, 2]
    assert grads.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_a_hook_may_repair_gradients() -> None:
    module = TieredEmbedding(9, 2, config=TierConfig(hbm="all", check_gradients=True), optimizer=ADAGRAD)
    grad = torch.tensor([[1.0, 1.0], [torch.nan, 1.0]])
    out = module(torch.tensor([1, 2]))
    with pytest.raises(GradientError, match="embedding id 2"):
        out.backward(grad)
    handle = module.register_gradient_hook(lambda ids, grads: grads.nan_to_num())
    module(torch.tensor([1, 2])).backward(grad)
    handle.remove()
    module.register_gradient_hook(lambda ids, grads: grads / 0.0)
    with pytest.raises(GradientError, match="embedding id 1, embedding id 2"):
        module(torch.tensor([1, 2])).backward(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda ids, grads: grads[:1], r"returned \(1, 6\) torch.float32; it must return .* \(\d+, 6\)"),
        (lambda ids, grads: grads.int(), r"returned .* torch.int32"),
        (lambda ids, grads: 1.0, "returned 1.0"),
        (lambda ids, grads: grads.numpy(), "returned array"),
        (lambda ids, grads: ids[10**6], "raised IndexError: "),
        (lambda ids: ids, "raised TypeError: "),
    ],
)
def test_a_wrong_hook_changes_no_row_and_names_its_table(hook: Any, message: str) -> None:
    module = bags()
    before = everything(module)
    handle = module.register_gradient_hook(hook, "b")
    with pytest.raises(GradientError, match=f"the gradient hook of table 'b' {message}"):
        train(module, range(1))
    assert module.fused_optimizer.num_updates == 0
    same(everything(module), before)
    handle.remove()
    train(module, range(1))


def test_what_is_no_hook() -> None:
    module = bags()
    with pytest.raises(ConfigError, match="the gradient hook of table 'a' is 3"):
        module.register_gradient_hook(3, "a")
    with pytest.raises(tierstore.InputError, match="there is no table 'x'"):
        module.register_gradient_hook(print, "x")


def test_frozen_tables_call_no_hook() -> None:
    module = bags()
    seen = seen_by(module, "a")
    module.embedding_bags["a"].requires_grad_(False)
    train(module, range(1))
    assert not seen


# -- clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [{"clip_grad_norm": 0.5}, {"clip_grad_value": 0.2}, {"clip_grad_norm": 0.5, "clip_grad_value": 0.3}],
    ids=str,
)
def test_clipping_is_torchs_by_row(limits: dict[str, float]) -> None:
    """torch.nn.utils' functions on every row as a parameter of its own, in float64."""
    module = bags({"a": optim.SGD(lr=0.1, **limits), "b": optim.SGD(lr=0.1)})
    seen = {name: seen_by(module, name) for name in FEATURES}
    before = {name: module.rows(IDS, name).double() for name in FEATURES}
    train(module, range(1))
    clipped = 0
    for name, ((ids, grads),) in seen.items():
        expected = before[name]
        for i, g in zip(ids.tolist(), grads.double(), strict=True):
            row = torch.nn.Parameter(expected[i].clone())
            row.grad = g.clone()
            if name == "a":
                if "clip_grad_value" in limits:
                    torch.nn.utils.clip_grad_value_([row], limits["clip_grad_value"])
                if "clip_grad_norm" in limits:
                    torch.nn.utils.clip_grad_norm_([row], limits["clip_grad_norm"])
            clipped += not torch.equal(row.grad, g)
            expected[i] -= 0.1 * row.grad
        torch.testing.assert_close(module.rows(IDS, name).double(), expected, rtol=1e-6, atol=1e-6)
    assert 0 < clipped < sum(len(ids) for ((ids, _),) in seen.values())


def test_limits_change_with_the_parameter_group() -> None:
    module = TieredEmbedding(9, 2, config=MEMORY, optimizer=optim.SGD(lr=1.0))
    before = module.rows([3])
    group = module.fused_optimizer.param_groups[0]
    assert group["clip_grad_norm"] is None
    group["clip_grad_value"] = 0.25
    module(torch.tensor([3])).sum().backward()
    assert torch.allclose(module.rows([3]), before - 0.25)
    group["clip_grad_value"] = None
    module(torch.tensor([3])).sum().backward()
    assert torch.allclose(module.rows([3]), before - 1.25)
    group["clip_grad_norm"] = 0.0
    with pytest.raises(ConfigError, match=r"sgd: clip_grad_norm is 0.0; it must be above 0, or None"):
        module(torch.tensor([3])).sum().backward()


def test_gradients_are_clipped_after_hooks_and_before_decay() -> None:
    spec = optim.SGD(lr=1.0, clip_grad_value=0.5, weight_decay=0.1)
    module = TieredEmbedding(9, 2, config=MEMORY, optimizer=spec)
    module.register_gradient_hook(lambda ids, grads: grads * 100.0)
    before = module.rows([3])
    module(torch.tensor([3])).sum().backward()
    assert torch.allclose(module.rows([3]), before - 0.5 - 0.1 * before)


def test_clipped_trainings_have_the_same_bits_in_tiers() -> None:
    spec = optim.Adam(lr=0.1, clip_grad_norm=0.3, clip_grad_value=0.2)
    expected = bags(spec)
    train(expected)
    with bags(spec, TierConfig(hbm="8KiB", ssd="1GiB", engine="memory", policy="lru")) as found:
        train(found)
        same(everything(found), everything(expected))
