"""The output of ``tierstore bench hit-rate --hbm``: hits and misses of each table and tier, by rank."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes
from tierstore.simulation import Stats, Training
from tierstore.trace.columns import printable

if TYPE_CHECKING:
    from tierstore.trace import Trace


def show(source: Trace, training: Training, ranks: list[Stats]) -> None:
    """Print the tiers of a training and what each table hits there."""
    from rich.console import Console
    from rich.table import Table

    head = f"{source.name}: {_tiers_of(training)}, policy {training.policy}, {_schedule(ranks)}"
    print(textwrap.fill(head, _WIDTH, break_long_words=False))
    grid = Table(padding=(0, 0))
    tiers = list(ranks[0]["tiers"])
    rank_column = ["rank"] if training.plan is not None else []
    columns = ["rows", *(f"{tier} hits" for tier in tiers), "new", *(f"{tier} rate" for tier in tiers[:2])]
    for column in (*rank_column, "table", *columns):
        grid.add_column(column, justify="left" if column == "table" else "right", no_wrap=column != "table")
    for rank, stats in enumerate(ranks):
        for name, table in stats["tables"].items():
            grid.add_row(
                *([str(rank)] if rank_column else []), printable(name), *_figures(table["tiers"], tiers)
            )
        grid.add_section()
    if len(ranks) > 1 or len(ranks[0]["tables"]) > 1:
        every = [table["tiers"] for stats in ranks for table in stats["tables"].values()]
        grid.add_row(*([""] if rank_column else []), "all", *_figures(_summed(every), tiers))
    width = None if sys.stdout.isatty() else 120
    Console(file=sys.stdout, highlight=False, markup=False, width=width).print(grid)
    print(_LEGEND)


_WIDTH = 80
_LEGEND = """\
rows: distinct rows of every batch, added up; hits: of these, found in the tier;
new: never updated before, so not read; rate: hits per row looked for there"""


def _tiers_of(training: Training) -> str:
    if training.plan is not None:
        return f"{training.plan.world_size} ranks with the plan's bytes"
    config = training.config
    sizes = {"hbm": config.hbm, "uvm": config.uvm}
    return ", ".join(
        f"{tier} {size if isinstance(size, str) else format_bytes(size)}"
        for tier, size in sizes.items()
        if size
    )


def _schedule(ranks: list[Stats]) -> str:
    """Return how many batches were known ahead."""
    groups = [group for stats in ranks for group in stats["groups"].values()]
    depths = sorted({group["depth"] for group in groups if group["depth"] is not None})
    windows = sorted({group["window"] for group in groups if group["window"] is not None})
    if not windows:
        return "one batch"
    span = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
    return f"depth {max(depths)}, window {span}"


def _figures(table: dict[str, Any], tiers: list[str]) -> list[str]:
    """Return the cells of a table: rows, hits by tier, new rows, and hit rates."""
    zero = {"rows": 0, "row_hits": 0, "row_misses": 0}
    found = [table.get(tier, zero) for tier in tiers]
    rates = [f"{one['row_hits'] / one['rows']:.4f}" if one["rows"] else "-" for one in found[:2]]
    hits = [f"{one['row_hits']:,}" for one in found]
    return [f"{found[0]['rows']:,}", *hits, f"{found[-1]['row_misses']:,}", *rates]


def _summed(every: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for tiers in every:
        for tier, counts in tiers.items():
            into = total.setdefault(tier, {"rows": 0, "row_hits": 0, "row_misses": 0})
            for name in into:
                into[name] += counts[name]
    return total


def to_json(training: Training, ranks: list[Stats]) -> dict[str, Any]:
    """Return the hits and misses of ``stats()`` on each rank as plain values."""
    config = training.config
    return {
        "policy": training.policy,
        "admission": str(config.admission),
        "hbm": config.hbm,
        "uvm": config.uvm,
        "optimizer": training.optimizer.name,
        "ranks": [
            {
                "tiers": stats["tiers"],
                "tables": {name: table["tiers"] for name, table in stats["tables"].items()},
                "layouts": {
                    name: {key: group[key] for key in ("slots", "row_bytes", "depth", "window")}
                    for name, group in stats["groups"].items()
                },
                **{name: stats[name] for name in ("lookups", *_COUNTERS)},
            }
            for stats in ranks
        ],
    }


_COUNTERS = ("evicted_rows", "written_rows", "overflow_rows", "refused_rows", "shrunk_plans")
