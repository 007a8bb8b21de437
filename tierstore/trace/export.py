"""Curves of every table of a trace, for planners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cache_policies import Policy, PreparedTrace, lru_curve, steady_curve
from cache_policies.curves import STEADY_SIZES, auto_rate
from cache_policies.prepared import split
from cache_policies.table_curve import TableCurve, planner_document
from tierstore.keys import ID_BITS
from tierstore.trace.trace import Trace

__all__ = ["TableCurve", "planner_input", "steady_curves", "table_curves"]


def table_curves(
    trace: Trace,
    prepared: PreparedTrace,
    rate: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[TableCurve]:
    """Return the LRU curve of each table of ``trace``, prepared as ``prepared``; ``rate`` samples rows."""
    batches = max(1, prepared.batches)
    curves = []
    for t, part in enumerate(_of_tables(prepared, len(trace.tables))):
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


def steady_curves(
    trace: Trace,
    prepared: PreparedTrace,
    policy: Policy,
    depth: int,
    progress: Callable[[int], object],
) -> dict[str, dict[str, Any]]:
    """Return for each table of ``trace``, prepared as ``prepared``, what ``tierstore plan --stats`` reads and
    the rows used (``footprint``).

    Misses are those of a training with ``policy`` and ``depth`` in the second half of the batches; the first
    half fills the memory. ``progress`` is called with the tables so far.
    """
    rate, found = auto_rate(prepared, 2 * STEADY_SIZES), {}
    for name, part in zip(trace.tables, _of_tables(prepared, len(trace.tables)), strict=True):
        found[name] = {
            "footprint": part.footprint,
            "unique_rows": part.uniques / prepared.batches,
            "accesses": part.accesses / prepared.batches,
            **steady_curve(part, policy, rate=rate, depth=depth),
        }
        progress(len(found))
    return found


def _of_tables(prepared: PreparedTrace, tables: int) -> Iterator[PreparedTrace]:
    """Yield the trace of each table alone."""
    return split(prepared, (prepared.keys >> np.uint64(ID_BITS)).astype(np.int64), tables)
