"""The gradient of an output may be a view of any other tensor: rows get the bits of a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.modules.keyed_batches import ROWS, keyed_batch
from tierstore import TierConfig, optim
from tierstore.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType, TieredEmbeddingBag
from tierstore.modules.lookup import PooledGradients
from tierstore.sparse import KeyedJaggedTensor

SPEC = optim.Adagrad(lr=0.1)
IN_MEMORY = TierConfig(hbm="all")
KEYS = ["f0", "f1", "f2"]


def bags(pooling: PoolingType, weighted: bool) -> EmbeddingBagCollection:
    """Tables of two dimensions, and so two parts."""
    tables = [
        EmbeddingBagConfig(ROWS, dim, f"t{n}", feature_names=[f"f{n}"], pooling=pooling)
        for n, dim in enumerate((4, 3, 4))
    ]
    return EmbeddingBagCollection(tables, weighted, config=IN_MEMORY, optimizer=SPEC)


def factors(rows: int, columns: int) -> Tensor:
    return torch.sin(torch.arange(rows * columns, dtype=torch.float32)).view(rows, columns)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "its own": lambda out: (out * factors(*out.shape)).sum(),
    "behind other columns": lambda out: (
        torch.cat([torch.ones(len(out), 5), out], 1) * factors(len(out), out.shape[1] + 5)
    ).sum(),
    "before other columns": lambda out: (
        torch.cat([out, torch.ones(len(out), 1)], 1) * factors(len(out), out.shape[1] + 1)
    ).sum(),
    "between other rows": lambda out: (
        torch.cat([torch.ones(2, out.shape[1]), out]) * factors(len(out) + 2, out.shape[1])
    ).sum(),
    "one number": lambda out: out.sum(),
    "one row": lambda out: (out.sum(0) * factors(1, out.shape[1])).sum(),
    "one column": lambda out: (out.sum(1, keepdim=True) * factors(len(out), 1)).sum(),
    "transposed": lambda out: (out.t().contiguous() * factors(out.shape[1], len(out))).sum(),
    "float64": lambda out: (out.double() * factors(*out.shape)).sum(),
}


def trained(
    layout: Callable[[Tensor], Tensor], pooling: PoolingType, weighted: bool, own: bool, accumulates: bool
) -> list[Tensor]:
    """Rows, and gradients of weights, after some steps; ``own``: with a gradient that is no view."""
    with bags(pooling, weighted) as module:
        found = []
        for number, size in enumerate((5, 1, 4)):
            keyed = keyed_batch(number, KEYS, size, weighted=weighted).ours

            def step(keyed: KeyedJaggedTensor = keyed) -> None:
                values = module(keyed).values()
                if own:
                    values.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
                layout(values).backward()

            if accumulates:
                with tierstore.accumulate(module):
                    step()
                    step()
            else:
                step()
            if weighted:
                found.append(keyed.weights().grad)
        return found + [module.rows(torch.arange(ROWS), f"t{n}") for n in range(3)]


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, True), (PoolingType.MAX, False)],
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_collections(
    layout: Callable[[Tensor], Tensor], pooling: PoolingType, weighted: bool, accumulates: bool
) -> None:
    ours = trained(layout, pooling, weighted, False, accumulates)
    expected = trained(layout, pooling, weighted, True, accumulates)
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dim", [1, 3])
def test_single_tables(layout: Callable[[Tensor], Tensor], dim: int) -> None:
    rows = []
    for own in (False, True):
        with TieredEmbeddingBag(ROWS, dim, mode="sum", config=IN_MEMORY, optimizer=SPEC) as module:
            for size in (4, 1):
                values = module(torch.arange(3 * size).view(size, 3) % 7)
                if own:
                    values.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
                layout(values).backward()
            rows.append(module.rows(torch.arange(ROWS)))
    assert torch.equal(*rows)


def test_a_view_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update reads the gradient of a concatenation where it is."""
    read: list[Tensor] = []
    prepared = PooledGradients.prepared

    def noted(gradients: PooledGradients, *rest: Any) -> Any:
        read.append(gradients.grad)
        return prepared(gradients, *rest)

    monkeypatch.setattr(PooledGradients, "prepared", noted)
    with bags(PoolingType.SUM, False) as module:
        values = module(keyed_batch(0, KEYS, 4).ours).values()
        joined = torch.cat([torch.ones(4, 2), values], 1)
        gradient = factors(*joined.shape)
        joined.backward(gradient)
    assert {grad.data_ptr() for grad in read} == {gradient.data_ptr() + 2 * 4}
