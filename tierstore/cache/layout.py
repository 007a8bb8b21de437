"""What a group's rows look like, and where a lookup's ids lie."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore._core import InitialValues
from tierstore.cache.device import DeviceRows
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.protocol import Keys
from tierstore.initializers import KINDS, Init


class IdSegment(NamedTuple):
    """Ids of one feature: ``address`` of ``length`` contiguous int64 (int32 if ``is_int32``) numbers."""

    name: str
    table: int
    address: int
    length: int
    is_int32: bool
    bound: int
    padding: int = -1


@dataclass(frozen=True)
class RowLayout:
    """What the rows of a group look like in the first tier, and how untouched rows of each table begin.
    ``codec``: the form of the rows in lower tiers, which initial values have, too."""

    dim: int
    row_bytes: int
    state_floats: int
    initial: InitialValues
    codec: Codec | None = None

    @property
    def stored_bytes(self) -> int:
        """The bytes of a row in lower tiers of another form, and in the store."""
        return self.row_bytes if self.codec is None else self.codec.row_bytes

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
        codec: Codec | None = None,
    ) -> RowLayout:
        """Return the layout of a tier group.

        ``inits``, ``seeds`` and ``columns`` have an entry per table, also for the tables of other groups.
        ``columns``: the first column of each table that is a range of a wider one's; None: all begin at 0.
        """
        parameters = np.array([init.parameters() for init in inits], np.float32).reshape(-1, 2)
        first, second = np.ascontiguousarray(parameters.T)
        initial = InitialValues(
            dim=dim,
            state_floats=state_floats,
            state_value=state_value,
            kinds=np.array([KINDS[init.kind] for init in inits], np.uint8),
            first=first,
            second=second,
            seeds=np.array(seeds, np.uint64),
            columns=None if columns is None else np.array(columns, np.int64),
        )
        return cls(dim, row_bytes, state_floats, initial, codec)

    def initialise(self, rows: DeviceRows, at: NDArray[np.int32] | None, keys: Keys) -> None:
        """Write the initial rows of ``keys`` to the slots ``at``, or to the first slots if ``at`` is None.

        Where lower tiers have another form, these are the nearest values that the form has, so it does not
        matter whether a row that was never updated was there. ``keys``: uint64, without repeats.
        """
        rows.initialise(self.initial, at, keys)
        if self.codec is not None and len(keys):
            self.codec.round(rows, keys, at)
