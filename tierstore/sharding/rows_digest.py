"""A digest of rows that does not depend on their order; ranks compare their rows by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
_MASK = (1 << 64) - 1


class RowsDigest:
    """Adds up a hash of every row: its id and the bits of its floats."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = 0

    @property
    def value(self) -> tuple[int, int]:
        """The number of rows, and the sum of their hashes."""
        return self._count, self._sum

    def add(self, ids: Tensor, parts: Sequence[Tensor]) -> None:
        """Add rows with these ids (n,). ``parts``: floats (n,) or (n, floats) each."""
        hashes = ids.numpy().astype(np.uint64) * _ODD
        for part in parts:
            for column in part.float().reshape(len(ids), -1).numpy().view(np.uint32).T:
                hashes = _mixed(hashes ^ column)
        self._count += len(ids)
        # modulo 2^64, of which scalars of NumPy warn
        self._sum = (self._sum + int(_mixed(hashes).sum(dtype=np.uint64))) & _MASK


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    hashes = hashes * _ODD
    return hashes ^ (hashes >> _SHIFT)
