"""Makes the plain values of ``stats()`` and ``table_curves()`` from the counters of an engine's groups."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from cache_policies.live import LiveCurves
from cache_policies.table_curve import TableCurve
from tierstore.cache.group import TierGroup
from tierstore.cache.stats import GroupCounters, TierCounters
from tierstore.store.protocol import StoredTable

logger = logging.getLogger("tierstore")

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # a report has the misses at these shares of the used rows


def report(groups: Sequence[TierGroup], tables: Sequence[TableCurve]) -> dict[str, Any]:
    """Return the values of ``Engine.stats``, without the store's own figures (``store``: None)."""
    counters = GroupCounters()
    tiers: dict[str, TierCounters] = {}
    for group in groups:
        counters.add(group.stats.counters)
        for name, tier in group.stats.tiers.items():
            total = tiers.setdefault(name, TierCounters())
            total.count(tier.rows, tier.row_hits, tier.accesses, tier.access_hits)
    return {
        **counters.report(),
        "tiers": {name: tier.report() for name, tier in tiers.items()},
        "memory": _memory(groups),
        "tables": _tables(groups, tables),
        "store": None,
        "groups": {group.name: _group(group) for group in groups},
    }


def table_curve(spec: StoredTable, curves: LiveCurves) -> TableCurve:
    """Return a table's miss-ratio curve as estimated so far. ``curves``: its group's."""
    rows, accesses = curves.per_batch(spec.index)
    curve, footprint = curves.curve(spec.index), curves.footprint(spec.index)
    return TableCurve(spec.name, spec.num_embeddings, footprint, rows, accesses, curve)


def _group(group: TierGroup) -> dict[str, object]:
    stats = group.stats
    depth, window = stats.prefetched or (None, None)
    return {
        **stats.counters.report(),
        "tiers": {name: tier.report() for name, tier in stats.tiers.items()},
        "depth": depth,
        "window": window,
        "read_ahead_limit": sum(tier.stats().read_ahead_limit for tier in group.stack.tiers),
        "slots": group.fast.capacity,
        "row_bytes": group.layout.row_bytes,
        "stored_row_bytes": group.layout.stored_bytes,
    }


def _tables(groups: Sequence[TierGroup], tables: Sequence[TableCurve]) -> dict[str, object]:
    tiers: dict[int, dict[str, object]] = {}
    for group in groups:
        found = _table_tiers(group)
        tiers.update({index: found[index] for index in group.tables})
    return {table.name: {**_table(table), "tiers": tiers[index]} for index, table in enumerate(tables)}


def _table_tiers(group: TierGroup) -> list[dict[str, object]]:
    """Return each tier's hits and misses of each table of a group, by table index, and the tier's present
    figures of it."""
    tables: list[dict[str, object]] = [{} for _ in range(group.fast.tables)]
    for tier in group.stack.tiers:
        now = tier.stats().tables
        for index, (rows, hits) in enumerate(group.stats.tables[tier.name].tolist()):
            counted = {"rows": rows, "row_hits": hits, "row_misses": rows - hits}
            tables[index][tier.name] = {**counted, **(now[index] if now else {})}
    return tables


def _table(table: TableCurve) -> dict[str, object]:
    """Return a table's rows used so far, its rows per batch, and LRU's misses at a few cache sizes."""
    sizes = [max(1, round(share * table.footprint)) for share in _SHARES]
    misses = np.clip(table.curve.capacity_miss_ratio(sizes), 0, 1).tolist() if table.accesses else []
    return {
        "footprint": table.footprint,
        "unique_rows": table.uniques,
        "accesses": table.accesses,
        "capacity_miss_ratio": dict(zip(sizes, misses, strict=False)),
    }


def _memory(groups: Sequence[TierGroup]) -> dict[str, int]:
    sizes = {"hbm": 0, "uvm": 0}
    for group in groups:
        for tier in group.stack.tiers:
            if tier.exclusive:
                sizes[tier.name] = sizes.get(tier.name, 0) + tier.stats().memory_bytes
    return {
        **sizes,
        "buffers": sum(group.buffer_bytes() for group in groups),
        "read_ahead": sum(tier.stats().read_ahead_bytes for group in groups for tier in group.stack.tiers),
        "window": sum(group.window.memory_bytes for group in groups),
        "curves": sum(group.curves.nbytes for group in groups),
    }


def warn_of_uncommitted(path: str | os.PathLike[str], extra: dict[str, object], changes: int) -> None:
    """Warn that ``close()`` leaves ``path`` at its last commit, which has ``extra``."""
    logger.warning(
        "%s stays at its last commit, of %s: %d updates since then are dropped, for close() does not know "
        "what else belongs to them; call commit(extra), or checkpoint.save, before close() to keep them",
        path,
        json.dumps(extra)[:200],
        changes,
    )
