"""Calls to an engine that every object above it offers."""

from __future__ import annotations

from typing import Any

from tierstore.cache.engine import Engine
from tierstore.config import parse_bytes
from tierstore.errors import ConfigError


class EngineCalls:
    """Calls about all tables of ``engine``, also when made on one of several modules that share it."""

    engine: Engine

    def stats(self) -> dict[str, Any]:
        """Return hit rates per tier, rows moved, stalls, memory and store figures; see
        :meth:`Engine.stats`."""
        return self.engine.stats()

    def table_curves(self) -> dict[str, Any]:
        """Return what a planner needs to know of the tables, estimated while training; see
        :meth:`Engine.table_curves`."""
        return self.engine.table_curves()

    def reset_stats(self) -> None:
        """Reset all counters."""
        self.engine.reset_stats()

    def flush(self) -> None:
        """Write all dirty rows down to the store."""
        self.engine.flush()

    def set_ssd(self, ssd: int | str) -> None:
        """Set the cap on the store's files, such as ``"200GiB"``, until it is closed. After a
        ``StoreFullError``, raise the cap and make the failed call again: nothing was lost."""
        self.engine.check_open()
        if self.engine.store is None:
            raise ConfigError("there is no ssd tier; set ssd and path in TierConfig")
        self.engine.store.set_cap(parse_bytes(ssd, "ssd"))

    def commit(self, extra: dict[str, object] | None = None, tag: str | None = None) -> int:
        """Make all rows (weights and optimizer state) durable; return the commit's number. ``tag`` names the
        commit."""
        return self.engine.commit(extra, tag)
