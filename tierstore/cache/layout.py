"""What a group's rows look like, and where a lookup's ids lie."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.tiers.protocol import Keys
from tierstore.initializers import KINDS, Init


@dataclass(frozen=True)
class Segment:
    """Ids of one feature: ``address`` of ``count`` contiguous int64 (int32 if ``is_int32``) numbers."""

    name: str
    table: int
    address: int
    count: int
    is_int32: bool
    bound: int
    padding: int = -1


@dataclass(frozen=True)
class RowLayout:
    """What the rows of a group look like, and how untouched rows of each table begin.

    The arrays are indexed by table; entries of tables in other groups are not used.
    """

    dim: int
    row_bytes: int
    state_floats: int
    state_value: float
    kinds: NDArray[np.uint8]
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    columns: NDArray[np.int64] | None = None
    """First column of each table that is a range of a wider one's; None: all begin at 0."""

    @classmethod
    def of(
        cls,
        dim: int,
        row_bytes: int,
        state_floats: int,
        state_value: float,
        inits: List[Init],
        seeds: List[int],
        columns: List[int] | None = None,
    ) -> RowLayout:
        return cls(
            dim, row_bytes, state_floats, state_value,
            np.array([KINDS[init.kind] for init in inits], np.uint8),
            np.array([init.a for init in inits], np.float32),
            np.array([init.b for init in inits], np.float32),
            np.array(seeds, np.uint64),
            None if columns is None else np.array(columns, np.int64),
        )  # fmt: skip

    def initialise(self, address: int, slots: NDArray[np.int32] | None, keys: Keys) -> None:
        _core.init_rows(
            address, self.row_bytes, slots, keys, self.dim, self.state_floats, self.state_value,
            self.kinds, self.a, self.b, self.seeds, self.columns,
        )  # fmt: skip
