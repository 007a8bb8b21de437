"""Rows as lower tiers hold them, in fewer bytes than the float32 rows of the fast tier."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.device import DeviceRows, Slots
from tierstore.keys import split
from tierstore.row_format import RowFormat

logger = logging.getLogger("tierstore")

Keys = NDArray[np.uint64]
RowBytes = NDArray[np.uint8]


class Codec:
    """Converts rows of one row layout between float32 and ``format``.

    ``seeds``: of each table of the engine, for stochastic rounding; None rounds to the nearest value.
    Encoding is a pure function of key and row. A row that was decoded and not changed is encoded to equal
    values.
    """

    def __init__(
        self, format: RowFormat, dim: int, state_floats: int, seeds: Sequence[int] | None = None
    ) -> None:
        self.format = format
        make = partial(
            _core.RowCodec, weights=format.weights, state=format.state, dim=dim, state_floats=state_floats
        )
        self._nearest = make()
        self._native = self._nearest if seeds is None else make(seeds=np.array(seeds, np.uint64))
        self.row_bytes = self._native.row_bytes
        """Bytes of an encoded row."""
        self.wide_bytes = RowFormat().row_bytes(dim, state_floats)
        """Bytes of a float32 row."""
        self._warned = False

    def encode(self, rows: DeviceRows, keys: Keys, out: RowBytes, slots: Slots | None = None) -> None:
        """Write the rows of ``keys`` (n,), which are at ``slots`` (None: 0 to n-1), to ``out``, encoded."""
        lost = rows.encode(self._native, keys, out, slots)
        if lost >= 0 and not self._warned:
            self._warned = True
            table, id = (int(part[0]) for part in split(keys[lost : lost + 1]))
            logger.warning(
                "row %d of table number %d has NaN, infinity or numbers 2**127 apart, which int8 cannot "
                "hold: all weights of such rows are NaN from now on. check_gradients=True finds the batch "
                "that brings them. (said once)",
                id,
                table,
            )

    def decode(
        self, rows: DeviceRows, encoded: RowBytes, slots: Slots | None = None, source: Slots | None = None
    ) -> None:
        """Write the encoded rows ``source`` (None: all, in order) to ``slots`` of ``rows`` (None: 0 to
        n-1)."""
        rows.decode(self._native, encoded, slots, source)

    def round(self, rows: DeviceRows, keys: Keys, slots: Slots | None = None) -> None:
        """Give the rows of ``keys`` at ``slots`` the nearest values that encoding does not change."""
        encoded = _core.rows_array(len(keys), self.row_bytes)
        rows.encode(self._nearest, keys, encoded, slots)
        self.decode(rows, encoded, slots)


def decoded(format: RowFormat, dim: int, state_floats: int, rows: RowBytes) -> RowBytes:
    """Return the float32 rows of a store's ``rows``."""
    if format.is_wide:
        return rows
    return converted(np.empty(len(rows), np.uint64), rows, Codec(format, dim, state_floats), None)


def converted(keys: Keys, rows: RowBytes, before: Codec | None, after: Codec | None) -> RowBytes:
    """Return ``rows`` (n, ...) of ``keys`` in the form ``after``; they are in the form ``before``. None is
    float32."""
    if before is after:
        return rows
    if before is not None:
        wide = _core.rows_array(len(rows), before.wide_bytes)
        before.decode(_core.HostRows.view(wide), rows)
        rows = wide
    if after is not None:
        encoded = _core.rows_array(len(keys), after.row_bytes)
        after.encode(_core.HostRows.view(np.ascontiguousarray(rows)), keys, encoded)
        rows = encoded
    return rows
