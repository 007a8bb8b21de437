"""Fused optimizers: specifications, and the view of one in use, imported on demand since it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierstore.optim.specs import (
    LAMB,
    NOT_GIVEN,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    from_dict,
    make,
)

if TYPE_CHECKING:
    from tierstore.optim.fused import FusedOptimizer

__all__ = [
    "LAMB",
    "NOT_GIVEN",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "LarsSGD",
    "OptimizerSpec",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "from_dict",
    "make",
]


def __getattr__(name: str) -> Any:
    if name != "FusedOptimizer":
        raise AttributeError(f"module 'tierstore.optim' has no attribute {name!r}")
    from tierstore.optim.fused import FusedOptimizer

    return FusedOptimizer
