"""A plan's report as tables on the terminal, and as a figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS, _MOST_WHYS = 40, 15
_PLOTS = ("png", "pdf", "svg")


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
    stages = _stages(places)
    equal: dict[tuple[str, ...], list[int]] = {}
    for place in sorted(places, key=lambda place: -max(place["stage_seconds"].values())):
        sizes = [f"{format_bytes(place[f'{name}_bytes'])} ({place[f'{name}_fill']:.0%})" for name in fills]
        cells = (*sizes, *(_ms(place["stage_seconds"][stage]) for stage in stages))
        equal.setdefault(cells, []).append(place[kind])
    title = f"{len(places)} {kind}{'s' * (len(places) > 1)}, slowest first"
    titles = [name.replace("_", " ") for name in (kind, *fills, *stages)]
    rows = [(_ranks_text(numbers), *cells) for cells, numbers in equal.items()]
    _print_view(console, title, titles, (kind,), rows)


def _stages(places: list[dict[str, Any]]) -> list[str]:
    """Stages that take time anywhere."""
    return [name for name in places[0]["stage_seconds"] if any(p["stage_seconds"][name] for p in places)]


def _ranks_text(ranks: list[int]) -> str:
    """Ranks as ranges; of many the first, and how many there are."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [f"{few[0]}-{few[-1]}" if len(few) > 2 else ",".join(map(str, few)) for few in ranges]
    return ",".join(parts) if len(parts) <= 3 else f"{','.join(parts[:3])},... ({len(ranks)})"


def _ms(seconds: float) -> str:
    """Milliseconds, or microseconds where that is shorter: columns are narrow."""
    return f"{seconds * 1e6:.2g} us" if 0 < seconds < 1e-4 else f"{seconds * 1e3:.3g} ms"


def plot_format(path: Path) -> str:
    """Return the format of a figure's path; raise ConfigError before there is anything to draw."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install tierstore[plot]") from None
    matplotlib.use("Agg")
    form = path.suffix[1:].lower()
    if form not in _PLOTS:
        ends = ", ".join(f".{known}" for known in _PLOTS)
        raise ConfigError(f"--plot {path}: give a path that ends in one of {ends}")
    return form


def drawn(report: dict[str, Any], form: str) -> bytes:
    """Fill of every memory and time of every stage, as a figure in the format ``form``."""
    from matplotlib import pyplot

    ranks, hosts = report["ranks"], report["hosts"]
    figure, (device, host, times) = pyplot.subplots(3, 1, figsize=(10, 9), layout="constrained")
    _fills(device, "rank", ranks, {"hbm": "tab:blue"})
    _fills(host, "host", hosts, {"host_memory": "tab:orange", "ssd": "tab:green"})
    spots = [rank["rank"] for rank in ranks]
    for stage in _stages(ranks):
        times.plot(spots, [1e3 * rank["stage_seconds"][stage] for rank in ranks], ".-", label=stage)
    per_host = len(ranks) // len(hosts)
    for k, stage in enumerate(_stages(hosts)):
        first = [host["host"] * per_host - 0.4 for host in hosts]
        line = {"color": f"C{k + 6}", "lw": 3, "label": f"{stage} of host"}
        seconds = [1e3 * host["stage_seconds"][stage] for host in hosts]
        times.hlines(seconds, first, [x + per_host - 0.2 for x in first], **line)
    times.axhline(1e3 * report["predicted_step_s"], color="black", linewidth=0.8, linestyle=":", label="step")
    times.set(xlabel="rank", ylabel="ms per step", title="Predicted stages", ylim=(0, None))
    for axes in (device, host, times):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    file = io.BytesIO()
    figure.savefig(file, format=form)
    pyplot.close(figure)
    return file.getvalue()


def _fills(axes: Any, kind: str, places: list[dict[str, Any]], memories: dict[str, str]) -> None:
    width = 0.8 / len(memories)
    for k, (name, color) in enumerate(memories.items()):
        at = [place[kind] + (k - (len(memories) - 1) / 2) * width for place in places]
        axes.bar(at, [100 * place[f"{name}_fill"] for place in places], width, label=name, color=color)
    axes.axhline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel=kind, ylabel="fill, %", title=f"{' and '.join(memories)} in use".replace("_", " "))
