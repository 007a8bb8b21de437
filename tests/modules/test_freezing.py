"""Rows that must not move: frozen modules, frozen tables of a collection, tables without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import all_rows, scramble
from tierstore import optim
from tierstore.errors import ConfigError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    offload,
)
from tierstore.modules.accumulation import accumulate
from tierstore.pipeline.prefetch import prefetch

IDS = torch.tensor([[1, 2], [3, 3]])
TABLES = ["t0", "t1", "t2"]
KEYS = ["f0", "f1", "f2"]


def step(module: Any, seed: int = 0) -> None:
    if isinstance(module, TieredEmbedding | TieredEmbeddingBag):
        out = scramble(module(IDS))
    elif isinstance(module, EmbeddingBagCollection):
        out = scramble(module(keyed_batch(seed, KEYS).ours).values())
    else:
        out = torch.stack(
            [scramble(part.values()) for part in module(keyed_batch(seed, KEYS).ours).values()]
        ).sum()
    if out.requires_grad:
        out.backward()


def make(kind: str, **options: Any) -> Any:
    if kind == "bag":
        return TieredEmbeddingBag(ROWS, 4, mode="sum", **options)
    if kind == "embedding":
        return TieredEmbedding(ROWS, 4, **options)
    names = zip(TABLES, KEYS, strict=True)
    if kind == "bags":
        return EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, 4, t, feature_names=[f]) for t, f in names], **options
        )
    return EmbeddingCollection([EmbeddingConfig(ROWS, 4, t, feature_names=[f]) for t, f in names], **options)


def rows(module: Any) -> list[Tensor]:
    found = []
    for table in module.table_names():
        name = None if len(module.table_names()) == 1 else table
        ids = torch.arange(ROWS)
        found += [module.rows(ids, name), *module.optimizer_rows(ids, name).values()]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


KINDS = ["bag", "embedding", "bags", "rows"]


def through_a_parent(module: nn.Module, value: bool) -> None:
    nn.Sequential(nn.Sequential(module)).requires_grad_(value)


def by_every_parameter(module: nn.Module, value: bool) -> None:
    for parameter in nn.ModuleList([module]).parameters():
        parameter.requires_grad = value


FREEZE: list[Callable[[nn.Module, bool], Any]] = [
    lambda module, value: module.requires_grad_(value),
    through_a_parent,
    by_every_parameter,
]


@pytest.mark.parametrize("freeze", FREEZE, ids=["module", "parent", "parameters"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_rows_stay_and_go_on_where_they_were(
    kind: str, freeze: Callable[[nn.Module, bool], Any]
) -> None:
    with (
        make(kind, optimizer=optim.Adam(lr=0.1)) as module,
        make(kind, optimizer=optim.Adam(lr=0.1)) as other,
    ):
        step(module)
        before, counted = rows(module), module.fused_optimizer.num_updates
        freeze(module, False)
        assert module.frozen
        step(module, 1)
        assert all(same(rows(module), before))
        assert module.fused_optimizer.num_updates == counted
        freeze(module, True)
        with torch.no_grad():
            step(module, 1)
        assert all(same(rows(module), before))
        step(module, 2)
        for seed in (0, 2):
            step(other, seed)
        assert all(same(rows(module), rows(other)))


@pytest.mark.parametrize(
    "spec", [optim.SGD(lr=0.1, weight_decay=0.1), optim.Adam(lr=0.1), optim.RowWiseAdagrad(lr=0.1)]
)
@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_one_frozen_table_of_a_collection_stays(kind: str, spec: optim.OptimizerSpec) -> None:
    """State and decay, too; the other tables are trained as if it were not there."""
    with make(kind, optimizer=spec) as module, make(kind, optimizer=spec) as other:
        before = rows(module)
        views = module.embedding_bags if kind == "bags" else module.embeddings
        views["t1"].requires_grad_(False)
        assert not module.frozen
        for seed in range(3):
            step(module, seed)
            step(other, seed)
        per_table = len(before) // 3
        frozen = slice(per_table, 2 * per_table)
        assert all(same(rows(module)[frozen], before[frozen]))
        whole = same(rows(module), rows(other))
        assert whole[:per_table] == [True] * per_table == whole[2 * per_table :]
        assert not all(whole[frozen])


def test_parameters_that_a_conversion_has_replaced_freeze_too() -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with make("bag", optimizer=optim.SGD(lr=0.1)) as module:
            nn.Sequential(module).to(torch.bfloat16)
            before = rows(module)
            nn.Sequential(module).requires_grad_(False)
            step(module)
            assert all(same(rows(module), before))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("depth", [0, 2])
def test_freezing_in_the_middle_of_a_prefetch(depth: int) -> None:
    batches = [torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(n)) for n in range(12)]
    ends = []
    for loop in (lambda module: prefetch(batches, module, depth=depth, window=2), lambda module: batches):
        with make("bag", optimizer=optim.Adagrad(lr=0.1)) as module:
            for number, ids in enumerate(loop(module)):
                module.requires_grad_(number not in (3, 4, 5, 8))
                out = scramble(module(ids))
                if out.requires_grad:
                    out.backward()
            ends.append(rows(module))
            assert module.fused_optimizer.num_updates == 8
    assert all(same(*ends))


def test_offloaded_modules_freeze_with_their_model() -> None:
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 4, mode="sum"), nn.Linear(4, 1))
    with offload(model, optimizer=optim.SGD(lr=0.1)) as replaced:
        before = all_rows(replaced["0"], ROWS)
        model.requires_grad_(False)
        assert not model(IDS).requires_grad
        model[1].requires_grad_(True)
        model(IDS).sum().backward()
        assert torch.equal(all_rows(replaced["0"], ROWS), before)
        assert len(replaced.optimizers) == 1


def test_tables_built_frozen_cannot_be_thawed() -> None:
    with make("bag", optimizer=None) as module:
        step(module)
        assert not any(parameter.requires_grad for parameter in module.parameters())
        before = all_rows(module, ROWS)
        module.requires_grad_(True)
        with pytest.raises(
            ConfigError, match=r"built with optimizer=None.*build them with an optimizer, or freeze"
        ):
            step(module)
        assert torch.equal(all_rows(module, ROWS), before)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_without_an_optimizer_are_read_and_never_trained(kind: str) -> None:
    with make(kind) as module:
        before = rows(module)
        with torch.no_grad():
            step(module)
        module.eval()
        step(module)
        module.train()
        with pytest.raises(
            ConfigError, match=r"built without an optimizer.*optimizer=tierstore.optim.Adagrad"
        ):
            step(module)
        assert all(same(rows(module), before))
        assert module.fused_optimizer.num_updates == 0


def test_offload_without_an_optimizer_is_refused_when_it_trains() -> None:
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 4, mode="sum"))
    with offload(model), pytest.raises(ConfigError, match="built without an optimizer"):
        model(IDS).sum().backward()


@pytest.mark.parametrize("apply", [_apply_optimizer_in_backward, apply_optimizer_in_backward])
@pytest.mark.parametrize(
    ("optimizer", "options", "said"),
    [
        (torch.optim.SGD, {"lr": 0.5}, r"build them with optimizer=tierstore.optim.SGD\(lr=0.5\)"),
        (torch.optim.Adagrad, {"lr": 0.5, "eps": 0.1}, r"tierstore.optim.Adagrad\(lr=0.5, eps=0.1\)"),
        (RowWiseAdagrad, {"lr": 0.5}, r"tierstore.optim.RowWiseAdagrad\(lr=0.5\)"),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, r"tierstore.optim.SGD\(lr=0.5, momentum=0.9\)"),
        (torch.optim.Adam, {"lr": 0.5, "amsgrad": True}, r"Adam\(...\), which does not have all of"),
        (torch.optim.Adadelta, {"lr": 0.5}, r"one of tierstore.optim: SGD, "),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:This API is deprecated")
def test_optimizers_applied_to_parameters_in_backward_are_refused(
    kind: str, optimizer: Any, options: dict[str, Any], said: str, apply: Callable[..., None]
) -> None:
    with make(kind, optimizer=optim.SGD(lr=0.1)) as module:
        before = rows(module)
        apply(optimizer, module.parameters(), options)
        with pytest.raises(ConfigError, match=said):
            step(module)
        assert all(same(rows(module), before))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_a_table_that_was_frozen_in_the_forward_pass_stays_as_in_torch(kind: str, compiled: bool) -> None:
    with make(kind, optimizer=optim.Adagrad(lr=0.5)) as module:
        view, before = getattr(module, module.views_name)["t1"], rows(module)
        module.register_gradient_hook(lambda ids, gradients: gradients + 1, "t1")
        run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        view.requires_grad_(False)
        out = run(keyed_batch(0, KEYS).ours)
        loss = sum(scramble(out[key] if kind == "bags" else out[key].values()) for key in KEYS)
        view.requires_grad_(True)
        loss.backward()
        assert same(rows(module), before) == [False, False, True, True, False, False]
        step(module)
        assert not any(same(rows(module), before))


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_a_pass_that_did_not_train_a_table_adds_nothing_to_its_kept_gradients(kind: str) -> None:
    options: dict[str, Any] = {"optimizer": optim.Adagrad(lr=0.5), "seed": 3}
    with make(kind, **options) as module, make(kind, **options) as whole, make(kind, **options) as last:
        view = getattr(module, module.views_name)["t1"]
        with accumulate(module):
            view.requires_grad_(False)
            step(module, 0)
            view.requires_grad_(True)
            step(module, 1)
        with accumulate(whole):
            step(whole, 0)
            step(whole, 1)
        with accumulate(last):
            step(last, 1)
        found, both, one = rows(module), rows(whole), rows(last)
        assert all(same(found, [*both[:2], *one[2:4], *both[4:]]))
        assert same(both, one)[2:4] == [False, False]
