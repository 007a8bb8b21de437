"""Versions of the rows of a table, by which state dicts without rows recognise the rows."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence

from tierstore.store.protocol import StoredTable


class Versions:
    """The version of every table of an engine: 32 hexadecimal digits, which differ when the rows may.

    A version is random; the version of a table that was never changed follows from the table's specification.
    A commit keeps the versions of its rows: ``committed`` is what :meth:`to_meta` returned for it, None for a
    new store.
    """

    def __init__(self, specs: Sequence[StoredTable], committed: Mapping[str, str] | None) -> None:
        self._names = [spec.name for spec in specs]
        self._known = (
            {spec.name: _untouched(spec) for spec in specs} if committed is None else dict(committed)
        )

    def of(self, table: int) -> str:
        """Return the version of the rows as they are now."""
        return self._known.setdefault(self._names[table], secrets.token_hex(16))

    def changed(self, tables: Iterable[int]) -> None:
        """Forget the versions of these tables: their rows have changed."""
        if not self._known:
            return
        for table in tables:
            self._known.pop(self._names[table], None)

    def to_meta(self) -> dict[str, str]:
        """Return all versions by the names of the tables."""
        return {name: self.of(table) for table, name in enumerate(self._names)}


def _untouched(spec: StoredTable) -> str:
    described = spec.to_dict()
    del described["index"]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode()).hexdigest()[:32]
