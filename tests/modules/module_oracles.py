"""Dense counterparts of tiered modules: the same rows in parameters, trained by torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tierstore import TierConfig, optim
from tierstore.cache.tiers.sizes import bytes_for


def small_tiers(
    dims: Iterable[int], spec: optim.OptimizerSpec, slots: int = 24, **options: Any
) -> TierConfig:
    """Tiers so small that rows must leave them: ``slots`` rows in all, the rest in a store in memory."""
    options = {"policy": "lru", "engine": "memory", "ssd": "1GiB"} | options
    needed = [bytes_for(slots, spec.row_bytes(dim), options["policy"]) for dim in dims]
    return TierConfig(hbm=sum(needed), **options)


class RowWiseAdagradReference(torch.optim.Optimizer):
    """One sum per row, for dense gradients: the published formula, written as tensor operations."""

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                total = self.state[param].setdefault("sum", torch.zeros(len(param)))
                total += param.grad.square().mean(dim=1)
                param -= group["lr"] * param.grad / (total.sqrt() + group["eps"]).unsqueeze(1)


@dataclass(frozen=True)
class Pair:
    """A fused optimizer and the torch optimizer that does the same to a dense table."""

    name: str
    spec: optim.OptimizerSpec
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    sparse: bool = False


PAIRS = [
    Pair("sgd", optim.SGD(lr=0.3), partial(torch.optim.SGD, lr=0.3)),
    Pair(
        "adagrad",
        optim.Adagrad(lr=0.2, eps=1e-6),
        lambda params: torch.optim.Adagrad(params, lr=0.2, eps=1e-6),
    ),
    Pair(
        "rowwise_adagrad",
        optim.RowWiseAdagrad(lr=0.2, eps=1e-6),
        partial(RowWiseAdagradReference, lr=0.2, eps=1e-6),
    ),
    # torch's SparseAdam places eps elsewhere, so it is made too small to matter
    Pair(
        "adam",
        optim.Adam(lr=0.05, eps=1e-15),
        lambda params: torch.optim.SparseAdam(list(params), lr=0.05, eps=1e-15),
        sparse=True,
    ),
]


def scramble(out: Tensor) -> Tensor:
    """A scalar whose gradient differs everywhere and depends on the values."""
    return (out.sin() * torch.arange(1, out.numel() + 1).view_as(out).cos()).sum()


def close(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-5, atol=2e-5)


def load_all(module: Any, weight: Tensor, table: str | None = None) -> None:
    """Gives a tiered table the rows of a dense one."""
    arguments = () if table is None else (None, table)
    module.load_rows(torch.arange(len(weight)), weight.detach(), *arguments)


def all_rows(module: Any, count: int, table: str | None = None) -> Tensor:
    arguments = () if table is None else (table,)
    return module.rows(torch.arange(count), *arguments)
