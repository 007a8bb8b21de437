"""Room for rows on their way between tiers, which is used again and again."""

from __future__ import annotations

from tierstore import _core
from tierstore.cache.tiers.protocol import RowBytes

_USES = 16  # after so many, a buffer that none of them half filled shrinks


class Buffer:
    """An array that is used again and again: what a peak took goes back to the system after some uses."""

    def __init__(self, row_bytes: int) -> None:
        self._rows: RowBytes = _core.rows_array(0, row_bytes)
        self._row_bytes = row_bytes
        self._largest = 0  # of the uses that are counted
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
            self._rows = _core.rows_array(0, self._row_bytes)  # the old room first: never both at once
            self._rows = _core.rows_array(wanted, self._row_bytes)
        return self._rows[:rows]
