"""What can be asked of an engine through whatever stands above it."""

from __future__ import annotations

from typing import Any

from tierstore.cache.engine import Engine


class EngineCalls:
    """Of all tables of ``engine``, whichever module asks."""

    engine: Engine

    def stats(self) -> dict[str, Any]:
        """Hit rates per tier, rows moved, stalls, memory and store figures; see :meth:`Engine.stats`."""
        return self.engine.stats()

    def table_curves(self) -> dict[str, Any]:
        """What a planner wants to know of the tables, estimated while training; see
        :meth:`Engine.table_curves`."""
        return self.engine.table_curves()

    def reset_stats(self) -> None:
        """Begins to count anew."""
        self.engine.reset_stats()

    def flush(self) -> None:
        """Writes all dirty rows down to the store."""
        self.engine.flush()

    def commit(self, extra: dict[str, Any] | None = None, tag: str | None = None) -> int:
        """Makes all rows (weights and optimizer state) durable; returns the commit's number. ``tag`` is
        a name for it."""
        return self.engine.commit(extra, tag)
