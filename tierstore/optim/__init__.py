"""Fused optimizers: specifications, and the view of one in use, imported on demand since it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierstore.optim.specs import (
    NOT_GIVEN,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    OptimizerSpec,
    RowWiseAdagrad,
    from_dict,
    make,
)

if TYPE_CHECKING:
    from tierstore.optim.fused import FusedOptimizer

__all__ = [
    "NOT_GIVEN",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "OptimizerSpec",
    "RowWiseAdagrad",
    "from_dict",
    "make",
]


def __getattr__(name: str) -> Any:
    if name != "FusedOptimizer":
        raise AttributeError(f"module 'tierstore.optim' has no attribute {name!r}")
    from tierstore.optim.fused import FusedOptimizer

    return FusedOptimizer
