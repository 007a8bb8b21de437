"""Compiled lookups: gradients of other tensors alone train no row, and none is derived twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.modules.test_lookup_ops import BACKENDS, assert_same, bag, embedding, ids_of, rows_of


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_weights_alone_train_no_row(backend: str) -> None:
    module = bag()
    before = rows_of(module)
    weights = torch.rand(3, 2, requires_grad=True)
    compiled = torch.compile(lambda w: module(ids_of(0, 3, 2), per_sample_weights=w).sum(), backend=backend)
    (found,) = torch.autograd.grad(compiled(weights), [weights])
    assert found.abs().sum() > 0
    assert_same(rows_of(module), before)
    assert module.fused_optimizer.num_updates == 0
    compiled(weights).backward()
    assert module.fused_optimizer.num_updates == 1


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "square": lambda module, w: module(ids_of(0, 3, 2), per_sample_weights=w).square().sum(),
    "linear": lambda module, w: module(ids_of(0, 3, 2), per_sample_weights=w).sum(),
    "computed": lambda module, w: module(ids_of(0, 3, 2), per_sample_weights=w.softmax(1)).sum(),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_refused(backend: str, loss: str, trained: bool) -> None:
    """Rows are no tensors of autograd, so second derivatives through them would be None, or lack a part."""
    module = bag().requires_grad_(trained)
    before = rows_of(module)
    weights = torch.rand(3, 2, requires_grad=True)
    compiled = torch.compile(lambda w: LOSSES[loss](module, w), backend=backend)

    def derive() -> None:
        (first,) = torch.autograd.grad(compiled(weights), [weights], create_graph=True)
        torch.autograd.grad(first.square().sum(), [weights], allow_unused=True)

    with pytest.raises(RuntimeError, match="cannot differentiate a lookup twice"):
        derive()
    assert_same(rows_of(module), before)
    compiled(weights).backward()
    assert weights.grad is not None
    assert module.fused_optimizer.num_updates == trained


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_dense_parameters_alone_train_no_row(backend: str, pooled: bool) -> None:
    """A compiler's graph runs as a whole, whatever is asked of it."""
    module: Any = bag() if pooled else embedding()
    before, top = rows_of(module), nn.Linear(4, 1)
    compiled = torch.compile(lambda ids: top(module(ids)).square().sum(), backend=backend)
    for _ in range(2):
        torch.autograd.grad(compiled(ids_of(0, 3, 2)), list(top.parameters()))
        compiled(ids_of(0, 3, 2)).backward(inputs=list(top.parameters()))
    assert_same(rows_of(module), before)
    compiled(ids_of(0, 3, 2)).backward()
    assert module.fused_optimizer.num_updates == 1
