"""Optimizers of dense parameters and tables, as one optimizer of torchrec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.optim import keyed

from tierstore.sharding.optimizer import KeyedFusedOptimizer


class KeyedTablesOptimizer(KeyedFusedOptimizer, keyed.KeyedOptimizer):
    """The fused optimizer of the sharded tables, which torchrec's wrappers know for a KeyedOptimizer."""


class CombinedOptimizer(keyed.CombinedOptimizer):
    """torchrec's CombinedOptimizer, which takes ``tierstore.sharding``'s fused optimizer as it is, too."""

    def __init__(self, optims: Sequence[Any]) -> None:
        super().__init__([one if isinstance(one, tuple) else ("", one) for one in optims])
