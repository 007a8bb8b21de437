"""An update is a transaction, too: tables of several row layouts, and the count of updates that Adam uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
import torch

from tests.density import every
from tests.pipeline.interrupts import Interrupted, Interrupter, Steps
from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TierConfig,
    TieredEmbeddingBag,
    accumulate,
    offload,
    optim,
)

ROWS, BEFORE = 60, 3
CONFIGS = {"memory": TierConfig(hbm="all"), "two tiers": TierConfig(hbm="16KiB", engine="memory")}


def build(config: TierConfig) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"of {name}"])
        for name, dim in (("a", 8), ("b", 16))
    ]
    return EmbeddingBagCollection(tables=tables, config=config, optimizer=optim.Adam(lr=0.05), seed=5)


def batch(number: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (10,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["of a", "of b"], values=ids, lengths=lengths)


STEPS = Steps(lambda: build(CONFIGS["memory"]), batch, ROWS, BEFORE + 2)
step, is_state = STEPS.step, STEPS.is_state


@pytest.mark.parametrize("collect", [nullcontext, accumulate], ids=["", "accumulated"])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_exception_at_any_line_of_a_step(config: str, collect: Callable) -> None:
    """Training goes on with the bits that it would have had."""
    stride = every(29)
    at, came = 1 + 5 * list(CONFIGS).index(config), True
    while came:
        interrupter = Interrupter(at)
        with build(CONFIGS[config]) as module:
            for number in range(BEFORE):
                step(module, number)
            with suppress(Interrupted), interrupter.on():
                step(module, BEFORE, collect)
            if is_state(module, BEFORE):
                step(module, BEFORE)
            assert is_state(module, BEFORE + 1), interrupter.where
            step(module, BEFORE + 1)
            assert is_state(module, BEFORE + 2), interrupter.where
        at, came = at + stride, interrupter.came
    assert at > 400


def two_modules(config: TierConfig, shared: bool) -> torch.nn.ModuleList:
    """Return modules with an engine each, or with one and a row layout in common; close the first ones."""
    if shared:
        model = torch.nn.ModuleList([torch.nn.EmbeddingBag(ROWS, 8, mode="sum") for _ in range(2)])
        for weight in model.parameters():
            torch.nn.init.constant_(weight, 0.5)
        offload(model, config, optim.Adam(lr=0.05))
        return model
    bags = [
        TieredEmbeddingBag(ROWS, 8, mode="sum", config=config, optimizer=optim.Adam(lr=0.05), name=name)
        for name in "ab"
    ]
    return torch.nn.ModuleList(bags)


def step_of_two(model: torch.nn.ModuleList, number: int) -> None:
    with accumulate(model):
        for part in range(2):
            ids = torch.randint(0, ROWS, (10, 3), generator=torch.Generator().manual_seed(2 * number + part))
            (model[0](ids) * model[1](ids + 0)).sin().sum().backward()


def rows_of_two(model: torch.nn.ModuleList) -> list[torch.Tensor]:
    ids = torch.arange(ROWS)
    return [found for bag in model for found in (bag.rows(ids), *bag.optimizer_rows(ids).values())]


@pytest.mark.parametrize("shared", [False, True], ids=["two engines", "one engine"])
def test_an_exception_at_any_line_of_the_update_of_two_modules(shared: bool) -> None:
    """Both modules are updated, or none."""

    def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, first, second))

    states = []
    for steps in range(BEFORE, BEFORE + 3):
        model = two_modules(CONFIGS["memory"], shared)
        for number in range(steps):
            step_of_two(model, number)
        states.append(rows_of_two(model))
    at, came = 3, True
    while came:
        interrupter = Interrupter(at)
        model = two_modules(CONFIGS["two tiers"], shared)
        for number in range(BEFORE):
            step_of_two(model, number)
        with suppress(Interrupted), interrupter.on():
            step_of_two(model, BEFORE)
        if same(rows_of_two(model), states[0]):
            step_of_two(model, BEFORE)
        assert same(rows_of_two(model), states[1]), interrupter.where
        step_of_two(model, BEFORE + 1)
        assert same(rows_of_two(model), states[2]), interrupter.where
        for bag in model:
            bag.close()
        at, came = at + 17, interrupter.came
    assert at > 400
