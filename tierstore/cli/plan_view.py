"""A plan's report as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS, _MOST_WHYS = 40, 15


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the plan as tables on the terminal."""
    _print_tables(console, report["tables"])
    _print_places(console, report["ranks"], "rank", ("hbm",))
    _print_places(console, report["hosts"], "host", ("host_memory", "ssd"))
    if report["feasible"]:
        console.print(
            f"[bold]fits[/]; predicted step {_ms(report['predicted_step_s'])}; {report['binding_detail']}; "
            f"planned in {report['plan_seconds']:.2f} s",
            soft_wrap=True,
        )
    if "simulated" in report:
        console.print(_simulated(report), soft_wrap=True)
    if report["what_would_help"]:
        how = "planned again" if report["helps_by_planning_again"] else "same cuts, caches divided anew"
        console.print(f"[bold]what would help most[/] ({how}):")
        for item in report["what_would_help"][:5]:
            console.print(f"  {item['change']}: {item['step_change']:+.1%} step")
    if report["assumed_rates"]:
        console.print(
            f"[yellow]assumed, not measured[/]: {', '.join(report['assumed_rates'])} "
            "(tierstore bench device measures this machine's)",
            soft_wrap=True,
        )


def _simulated(report: dict[str, Any]) -> str:
    """Return a sentence about the batches that the hit rates are of, and about those before them."""
    known = report["simulated"]
    rates = []
    for kind in ("predicted", "cold_start"):
        shards = [shard for table in report["tables"] for shard in table[kind]]
        rows, misses = (sum(shard[name] for shard in shards) for name in ("unique_rows", "hbm_misses"))
        rates.append(f"{1 - misses / max(rows, 1e-12):.1%}")
    text = f"hit rates are simulated: policy {known['policy']}, the last {known['batches']:,} batches"
    cold = f"; {rates[1]} in the first {known['cold_batches']:,}, which fill the tiers"
    return f"{text} (all tables: {rates[0]}{cold if known['cold_batches'] else ''})"


def _print_view(
    console: Console, title: str, columns: Sequence[str], left: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print the first rows as a table, whose columns ``left`` are not numbers."""
    from rich import box
    from rich.table import Table

    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        view.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for cells in rows[:_MOST_ROWS]:
        view.add_row(*cells)
    console.print(view)
    _print_rest(console, len(rows) - _MOST_ROWS)


def _print_rest(console: Console, number: int, indent: str = "") -> None:
    if number > 0:
        console.print(f"{indent}... and {number} more (--json has all)")


def _print_tables(console: Console, tables: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    sizes = ("hbm_bytes", "uvm_bytes", "ssd_bytes")
    rows, whys = [], []
    for table in sorted(tables, key=lambda t: -sum(s[key] for s in t["shards"] for key in sizes)):
        name, shards = escape(table["name"]), table["shards"]
        sums = (format_bytes(sum(shard[key] for shard in shards)) for key in sizes)
        ranks, rate = _ranks_text([shard["rank"] for shard in shards]), f"{table['predicted_hit_rate']:.1%}"
        rows.append((name, table["sharding_type"], ranks, *sums, rate))
        whys.append(f"  {name}: {table['why']}")
    titles = ("table", "cut", "ranks", "hbm", "uvm", "ssd", "hit rate")
    title = f"{len(tables)} table{'s' * (len(tables) > 1)}, largest first"
    _print_view(console, title, titles, titles[:3], rows)
    console.print("[bold]why they are there[/]")
    for why in whys[:_MOST_WHYS]:
        console.print(why, soft_wrap=True)
    _print_rest(console, len(whys) - _MOST_WHYS, "  ")


def _print_places(console: Console, places: list[dict[str, Any]], kind: str, fills: Sequence[str]) -> None:
    """Print ranks or hosts, slowest first, equal ones in one line."""
    names = _stages(places)
    equal: dict[tuple[str, ...], list[int]] = {}
    for place in sorted(places, key=lambda place: -max(place["stage_seconds"].values())):
        sizes = [f"{format_bytes(place[f'{name}_bytes'])} ({place[f'{name}_fill']:.0%})" for name in fills]
        cells = (*sizes, *(_ms(place["stage_seconds"][stage]) for stage in names))
        equal.setdefault(cells, []).append(place[kind])
    title = f"{len(places)} {kind}{'s' * (len(places) > 1)}, slowest first"
    titles = [name.replace("_", " ") for name in (kind, *fills, *names)]
    rows = [(_ranks_text(numbers), *cells) for cells, numbers in equal.items()]
    _print_view(console, title, titles, (kind,), rows)


def _stages(places: list[dict[str, Any]]) -> list[str]:
    """Return the stages that take time anywhere."""
    return [name for name in places[0]["stage_seconds"] if any(p["stage_seconds"][name] for p in places)]


def _ranks_text(ranks: list[int]) -> str:
    """Write ranks as ranges; of many ranges the first, and how many ranks there are."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [f"{few[0]}-{few[-1]}" if len(few) > 2 else ",".join(map(str, few)) for few in ranges]
    return ",".join(parts) if len(parts) <= 3 else f"{','.join(parts[:3])},... ({len(ranks)})"


def _ms(seconds: float) -> str:
    """Write milliseconds, or microseconds where that is shorter: columns are narrow."""
    seconds = 0.0 if seconds < 1e-12 else seconds  # less is what rounding leaves of zero
    return f"{seconds * 1e6:.2g} us" if 0 < seconds < 1e-4 else f"{seconds * 1e3:.3g} ms"
