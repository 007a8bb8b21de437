"""Curves of every table of a trace, for planners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cache_policies import PreparedTrace, lru_curve
from cache_policies.prepared import split
from cache_policies.table_curve import TableCurve, planner_document
from tierstore.keys import ID_BITS
from tierstore.trace.trace import Trace

__all__ = ["TableCurve", "planner_input", "table_curves"]


def table_curves(
    trace: Trace,
    prepared: PreparedTrace,
    rate: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[TableCurve]:
    """Return the LRU curve of each table of ``trace``, prepared as ``prepared``; ``rate`` samples rows."""
    table_of = (prepared.keys >> np.uint64(ID_BITS)).astype(np.int64)
    batches = max(1, prepared.batches)
    curves = []
    for t, part in enumerate(split(prepared, table_of, len(trace.tables))):
        known = trace.num_embeddings[t] if trace.num_embeddings else 0
        curves.append(
            TableCurve(
                trace.tables[t],
                known or max(1, part.footprint),
                part.footprint,
                part.uniques / batches,
                part.accesses / batches,
                lru_curve(part, rate),
            )
        )
        if progress:
            progress(t + 1, len(trace.tables))
    return curves


def planner_input(trace: Trace, curves: list[TableCurve], bins: int = 100) -> dict[str, Any]:
    """Return plain JSON for ``tierstore plan --stats`` (docs/reference/policies.md)."""
    return planner_document(trace.name, curves, bins)
