"""Gradient hooks of tables on a fake GPU get and give tensors of the CPU, with the bits of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.fake import ORDERS
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import MODULES, ROWS, dense, same


def trained(name: str, device: str | None) -> list[Any]:
    """What hooks got, outputs and rows; gradients of some tables are changed, others only seen."""
    make, inputs = MODULES[name]
    found: list[Any] = []
    torch.manual_seed(7)

    def hook(ids: Tensor, gradients: Tensor) -> Tensor | None:
        assert ids.is_cpu
        assert gradients.is_cpu
        found.extend([ids.clone(), gradients.clone()])
        return gradients * 0.5 if len(ids) % 2 else None

    with make(device) as module:
        tables = module.table_names()
        for table in tables[:2]:
            module.register_gradient_hook(hook, table)
        for step in range(6):
            module(*inputs(step)) if step % 2 else None  # dropped
            dense(module(*inputs(step))).float().square().sum().backward()
        found += [module.rows(torch.arange(ROWS), table) for table in tables]
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["rows with padding", "collection", "weighted", "rows of bf16"])
def test_hooks_have_the_bits_of_the_host(name: str, order: str) -> None:
    with fake_torch(order, seed=5):
        found = trained(name, "cuda:0")
    same(found, trained(name, None))
