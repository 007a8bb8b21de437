"""What ``stats()`` and ``table_curves()`` tell of an engine: plain values, made of its groups' counters."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from cache_policies.live import LiveCurves
from cache_policies.table_curve import TableCurve
from tierstore.cache.group import TierGroup
from tierstore.cache.stats import GroupCounters, TierCounters
from tierstore.store.protocol import StoredTable

logger = logging.getLogger("tierstore")

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the rows used: sizes at which a report tells the misses


def report(groups: Sequence[TierGroup], tables: Sequence[TableCurve]) -> dict[str, Any]:
    """What ``Engine.stats`` says, the store's own figures (``store``: None) excepted."""
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
    """A table as ``curves``, its group's, know it by now."""
    rows, accesses = curves.per_batch(spec.index)
    curve, footprint = curves.curve(spec.index), curves.footprint(spec.index)
    return TableCurve(spec.name, spec.num_embeddings, footprint, rows, accesses, curve)


def _group(group: TierGroup) -> dict[str, Any]:
    stats = group.stats
    depth, window = stats.prefetched or (None, None)
    return {
        **stats.counters.report(),
        "tiers": {name: tier.report() for name, tier in stats.tiers.items()},
        "depth": depth,
        "window": window,
        "slots": group.fast.capacity,
        "row_bytes": group.layout.row_bytes,
    }


def _tables(groups: Sequence[TierGroup], tables: Sequence[TableCurve]) -> dict[str, Any]:
    tiers: dict[int, dict[str, Any]] = {}
    for group in groups:
        found = _table_tiers(group)
        tiers.update({index: found[index] for index in group.tables})
    return {table.name: {**_table(table), "tiers": tiers[index]} for index, table in enumerate(tables)}


def _table_tiers(group: TierGroup) -> list[dict[str, Any]]:
    """What every tier of a group had of each table, by its index; of memory tiers also the rows that it has
    now, and its slots where they are the table's own (``slots``; None: it shares)."""
    memory = {
        tier.name: (tier.plan.share_of, tier.native.table_rows(), tier.plan.holds_all)
        for tier in group.memory_tiers()
    }
    tables: list[dict[str, Any]] = [{} for _ in range(group.fast.tables)]
    for name, counts in group.stats.tables.items():
        for index, (rows, hits) in enumerate(counts.tolist()):
            told: dict[str, Any] = {"rows": rows, "row_hits": hits, "row_misses": rows - hits}
            if name in memory:
                share_of, resident, all_ = memory[name]
                own = share_of(index)
                told["resident_rows"] = resident[index]
                told["slots"] = None if own is None or len(own.tables) > 1 else own.slots
                told["holds_all"] = all_ if own is None else own.holds_all
            tables[index][name] = told
    return tables


def _table(table: TableCurve) -> dict[str, Any]:
    """Rows used so far, what a batch looks up, and LRU's misses at a few sizes."""
    sizes = [max(1, round(share * table.footprint)) for share in _SHARES]
    misses = np.clip(table.curve.capacity_miss_ratio(sizes), 0, 1).tolist() if table.accesses else []
    return {
        "footprint": table.footprint,
        "unique_rows": table.uniques,
        "accesses": table.accesses,
        "capacity_miss_ratio": dict(zip(sizes, misses, strict=False)),
    }


def _memory(groups: Sequence[TierGroup]) -> dict[str, int]:
    return {
        "hbm": sum(group.fast.memory_bytes() for group in groups),
        "uvm": sum(group.below.host.memory_bytes() for group in groups if group.below.host is not None),
        "buffers": sum(group.below.buffer_bytes() for group in groups),
        "window": sum(group.window.memory_bytes for group in groups),
        "curves": sum(group.curves.nbytes for group in groups),
    }


def warn_of_uncommitted(path: Any, extra: dict[str, Any], changes: int) -> None:
    """Says that ``close()`` leaves ``path`` at its last commit, which has ``extra``."""
    logger.warning(
        "%s stays at its last commit, of %s: %d updates since then are dropped, for close() does not know "
        "what else belongs to them; call commit(extra), or checkpoint.save, before close() to keep them",
        path,
        json.dumps(extra)[:200],
        changes,
    )
