"""Crosses of categorical columns, hashed into tables of a chosen size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finaliser, a bijection of uint64: every input bit reaches every output bit."""
    mixed = values.astype(np.uint64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hashed_cross(columns: Sequence[np.ndarray], num_embeddings: int) -> np.ndarray:
    """Hash combinations of integer ``columns``, each (n,), to int32 ids below ``num_embeddings`` <= 2^31."""
    state = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        state = mix64(state + _GOLDEN + column.astype(np.uint64))
    return (state % np.uint64(num_embeddings)).astype(np.int32)
