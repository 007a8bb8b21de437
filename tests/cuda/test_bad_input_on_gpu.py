"""What users may do wrong with a module on a fake GPU: one named error, nothing changes, training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import MODULES, ROWS, collection, dense, keyed, same
from tests.cuda.test_training_on_fake_gpu import counters
from tierstore import ConfigError, InputError

NAMES = ["rows with padding", "max", "weighted", "shared bags", "sequences", "collection of dtypes"]
MOVES: dict[str, Callable[[nn.Module], object]] = {
    "cpu": lambda module: module.cpu(),
    "cuda:1": lambda module: module.cuda(1),
    "cuda:1 in float64": lambda module: module.to("cuda:1", torch.float64),
    "cuda:1 without contents": lambda module: module._apply(lambda t: torch.empty(t.shape, device="cuda:1")),
}


def state(module: Any) -> list[Any]:
    rows = [module.rows(torch.arange(ROWS), table) for table in module.table_names()]
    return [*rows, module.fused_optimizer.num_updates, module.engine.uncommitted, counters(module.stats())]


def step(module: Any, inputs: tuple[Any, ...]) -> None:
    dense(module(*inputs)).float().square().sum().backward()


def with_id(inputs: tuple[Any, ...], wrong: int) -> tuple[Any, ...]:
    ids = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0].values()
    ids.view(-1)[3] = wrong
    return inputs


@pytest.mark.parametrize("name", NAMES)
def test_nothing_changes(name: str) -> None:
    make, inputs = MODULES[name]
    results = []
    for device in (None, "cuda:0"):
        torch.manual_seed(7)
        if device is None:
            with make(None) as module:
                for number in range(4):
                    step(module, inputs(number))
                results.append(state(module))
            continue
        with fake_torch("random", seed=3, devices=2), make(device) as module:
            step(module, inputs(0))
            before = state(module)
            for ids_on in ("cpu", "cuda:0", "cuda:1"):
                for wrong in (ROWS, -1, 2**31 - 1):
                    given = with_id(inputs(1), wrong)
                    with pytest.raises(InputError, match=rf"id {wrong} at position \d+ is out of range"):
                        module(*(part.to(ids_on) for part in given))
            for move in MOVES.values():
                with pytest.raises(
                    ConfigError, match=r"are on cuda:0, where they were opened, and cannot be"
                ):
                    move(nn.Sequential(module))
            same(state(module), before)
            for number in range(1, 4):
                step(module, inputs(number))
            results.append(state(module))
    same(*results)


def test_a_model_with_tables_on_two_gpus_is_prefetched() -> None:
    """Each table computes on its own GPU; a wrong id of one leaves both as they are."""
    results = []
    for devices in ((None, None), ("cuda:0", "cuda:1")):
        with fake_torch("random", seed=2, devices=2):
            model = nn.ModuleList([collection(device=device) for device in devices])
            batches = [(keyed(number), keyed(number + 50)) for number in range(8)]
            with_id(batches[4], ROWS)
            found: list[Any] = []
            for number, batch in enumerate(tierstore.prefetch(batches, model, depth=2, window=3)):
                if number == 4:
                    before = [value for module in model for value in state(module)[:-1]]
                    with pytest.raises(InputError, match=f"id {ROWS} at position"):
                        [module(part) for module, part in zip(model, batch, strict=True)]
                    same([value for module in model for value in state(module)[:-1]], before)
                    continue
                outs = [module(part).values() for module, part in zip(model, batch, strict=True)]
                sum(out.cpu().square().sum() for out in outs).backward()
                found += [out.detach().cpu() for out in outs]
            found += [value for module in model for value in state(module)[:-2]]
            for module in model:
                module.close()
            results.append(found)
    same(*results)
