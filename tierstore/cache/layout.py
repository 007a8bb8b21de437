"""What a group's rows look like, and where a lookup's ids lie."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore._core import HostRows, InitialValues, UpdateRounding
from tierstore.cache.device import DeviceRows
from tierstore.cache.tiers.codec import Codec, converted
from tierstore.cache.tiers.protocol import Keys, RowBytes
from tierstore.errors import InputError
from tierstore.initializers import KINDS, Init
from tierstore.row_format import WIDE, RowFormat


class IdSegment(NamedTuple):
    """Ids of one feature: ``address`` of ``length`` contiguous int64 (int32 if ``is_int32``) numbers."""

    name: str
    address: int
    length: int
    is_int32: bool
    table: int
    bound: int
    padding: int = -1


def out_of_range(name: str, id: int, position: int, bound: int) -> InputError:
    """Return the error of an id that a table does not have."""
    return InputError(f"{name}: id {id} at position {position} is out of range [0, {bound})")


class Rounding(NamedTuple):
    """The seed (uint64) of every table, and its first column (int64) in a wider table."""

    seeds: NDArray[np.uint64]
    columns: NDArray[np.int64]


@dataclass(frozen=True)
class RowLayout:
    """What the rows of a group look like in the fast tier, and how untouched rows of each table begin.

    ``codec``: the form of the rows in lower tiers, which initial values have, too. ``weights``: the dtype of
    the tables. ``rounding``: what stochastic rounding of updates needs; None rounds to the nearest value.
    """

    dim: int
    row_bytes: int
    state_floats: int
    initial: InitialValues
    codec: Codec | None = None
    weights: str = WIDE.weights
    rounding: Rounding | None = None

    @property
    def stored_bytes(self) -> int:
        """The bytes of a row in lower tiers of another form, and in the store."""
        return self.row_bytes if self.codec is None else self.codec.row_bytes

    @classmethod
    def of(
        cls,
        dim: int,
        state_floats: int,
        state_value: float,
        inits: List[Init],
        seeds: List[int],
        columns: List[int] | None = None,
        codec: Codec | None = None,
        weights: str = WIDE.weights,
        rounds: bool = False,
        zeros: int = 0,
    ) -> RowLayout:
        """Return the layout of a tier group. ``rounds``: updates round at random, not to the nearest value.
        ``state_value``: of the state of untouched rows, but for the last ``zeros`` floats, which are 0.

        ``inits``, ``seeds`` and ``columns`` have an entry per table, also for the tables of other groups.
        ``columns``: the first column of each table that is a range of a wider one's; None: all begin at 0.
        """
        parameters = np.array([init.parameters() for init in inits], np.float32).reshape(-1, 2)
        first, second = np.ascontiguousarray(parameters.T)
        initial = InitialValues(
            dim=dim,
            state_floats=state_floats - zeros,
            state_value=state_value,
            kinds=np.array([KINDS[init.kind] for init in inits], np.uint8),
            first=first,
            second=second,
            seeds=np.array(seeds, np.uint64),
            columns=None if columns is None else np.array(columns, np.int64),
        )
        row_bytes = RowFormat(weights).row_bytes(dim, state_floats)
        rounding = None
        if rounds and weights != WIDE.weights:
            rounding = Rounding(np.array(seeds, np.uint64), np.array(columns or [0] * len(seeds), np.int64))
        return cls(dim, row_bytes, state_floats, initial, codec, weights, rounding)

    def view(self, rows: RowBytes) -> HostRows:
        """Return the host array's rows of the fast tier for kernels to work on."""
        return HostRows.view(rows, self.weights)

    def rounding_of(self, keys: Keys) -> UpdateRounding | None:
        """Return how an update of the rows of ``keys`` rounds weights; None: to the nearest value."""
        if self.rounding is None:
            return None
        return UpdateRounding(keys=keys, seeds=self.rounding.seeds, columns=self.rounding.columns)

    @cached_property
    def _own(self) -> Codec:
        return Codec(RowFormat(self.weights), self.dim, self.state_floats)

    def widened(self, rows: RowBytes) -> NDArray[np.float32]:
        """Return weights and state of ``rows`` (n, row_bytes) as float32: a view of float32 rows."""
        form = None if self.weights == WIDE.weights else self._own
        return converted(np.empty(0, np.uint64), rows, form, None).view(np.float32)

    def narrow(self, values: NDArray[np.float32], rows: RowBytes) -> None:
        """Write what :meth:`widened` returned back into ``rows``, rounded to the nearest values."""
        if self.weights != WIDE.weights:
            self._own.encode(HostRows.view(values.view(np.uint8)), np.zeros(len(rows), np.uint64), rows)

    def initialise(self, rows: DeviceRows, at: NDArray[np.int32] | None, keys: Keys) -> None:
        """Write the initial rows of ``keys`` to the slots ``at``, or to the first slots if ``at`` is None.

        Where lower tiers have another form, these are the nearest values that the form has, so it does not
        matter whether a row that was never updated was there. ``keys``: uint64, without repeats.
        """
        rows.initialise(self.initial, at, keys)
        if self.codec is not None and len(keys):
            self.codec.round(rows, keys, at)
