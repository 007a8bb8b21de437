"""Buffers for rows on their way between tiers."""

from __future__ import annotations

from tierstore import _core
from tierstore.cache.tiers.protocol import RowBytes

_USES = 16  # a buffer shrinks after this many uses of which none half filled it


class Buffer:
    """An array for repeated use: memory that only a peak needed goes back to the system after some uses."""

    def __init__(self, row_bytes: int) -> None:
        self._rows: RowBytes = _core.rows_array(0, row_bytes)
        self._row_bytes = row_bytes
        self._largest = 0  # rows of the largest counted use
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        return self._rows.nbytes

    def take(self, rows: int) -> RowBytes:
        """Return room for ``rows`` rows, uint8 (rows, row_bytes), valid until the next call."""
        self._largest = max(self._largest, rows)
        self._uses += 1
        wanted = len(self._rows)
        if rows > wanted:
            wanted = rows + rows // 4
        elif self._uses >= _USES:
            if wanted > 2 * self._largest:
                wanted = self._largest + self._largest // 4
            self._largest = self._uses = 0
        if wanted != len(self._rows):
            self._rows = _core.rows_array(
                0, self._row_bytes
            )  # drop the old array first, so that both never exist at once
            self._rows = _core.rows_array(wanted, self._row_bytes)
        return self._rows[:rows]
