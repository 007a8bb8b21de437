"""The output of ``tierstore bench hit-rate``: tables, JSON, and advice in words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes
from tierstore.trace.columns import printable

from ._hit_rate_answer import Answer, Size, simulate_one

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cache_policies import Point, Policy, PreparedTrace
    from tierstore.trace import TableCurve


_GOAL = 0.01  # capacity misses per unique row that "almost as good as all in memory" allows
_STEPS = 10  # of the search for the smallest budget


@contextmanager
def progress() -> Iterator[Callable[[str, int | None], Callable[..., None]]]:
    """Give ``bars(text, total)``, which returns ``step(done, ...)``; bars show on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:

        def bars(text: str, total: int | None) -> Callable[..., None]:
            task = shown.add_task(text, total=total)
            return lambda done, *_: shown.update(task, completed=done)

        yield bars


def io_seconds(answer: Answer, point: Point) -> float:
    """Return the seconds per batch that the reads of capacity misses take, one row per read."""
    return point.capacity_miss_ratio * answer.trace.uniques / max(1, answer.trace.batches) / answer.iops


def show(answer: Answer) -> None:
    from rich.console import Console
    from rich.table import Table

    trace = answer.trace
    rate = answer.points[0].rate
    print(
        f"{answer.source}: {trace.batches:,} batches, {trace.accesses:,} accesses to {trace.footprint:,} "
        f"rows; {trace.uniques / trace.accesses:.1%} of a batch's accesses are distinct rows"
        + ("" if rate == 1 else f"; estimated from {rate:.2%} of the rows")
    )
    table = Table(caption=_caption(answer), caption_justify="left")
    for column in ("policy", "rows", "of used", "memory"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for column in ("miss/access", "miss/unique", "capacity", "vs Belady", "IO ms/batch"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for point in answer.points:
        if last not in (None, point.policy):
            table.add_section()
        last = point.policy
        best = answer.belady[point.size_rows].capacity_miss_ratio
        table.add_row(
            point.policy,
            f"{point.size_rows:,}" + ("!" if point.overflowed else ""),
            f"{point.size_rows / trace.footprint:.1%}",
            format_bytes(answer.size_bytes[point.policy, point.size_rows]),
            f"{point.miss_ratio:.4f}",
            f"{point.unique_miss_ratio:.4f}",
            f"{point.capacity_miss_ratio:.4f}",
            f"{point.capacity_miss_ratio / best:.2f}x" if best else "-",
            f"{1000 * io_seconds(answer, point):.1f}",
        )
    for size, point in sorted(answer.belady.items()):
        table.add_row(
            "[dim]belady",
            f"[dim]{size:,}",
            f"[dim]{size / trace.footprint:.1%}",
            "",
            f"[dim]{point.miss_ratio:.4f}",
            f"[dim]{point.unique_miss_ratio:.4f}",
            f"[dim]{point.capacity_miss_ratio:.4f}",
            "",
            f"[dim]{1000 * io_seconds(answer, point):.1f}",
        )
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    fit(table, console)
    console.print(table)


def fit(table: Table, console: Console) -> None:
    """Fit ``table`` to a narrow terminal: remove spaces, then columns that follow from other columns."""

    def too_wide() -> bool:
        return console.measure(table, options=console.options.update(width=1000)).maximum > console.width

    if too_wide():
        table.padding = (0, 0)
    for name in ("IO ms/batch", "memory", "of used", "vs Belady"):
        if too_wide():
            table.columns = [column for column in table.columns if column.header != name]


def _caption(answer: Answer) -> str:
    compulsory = answer.trace.footprint / answer.trace.uniques
    overflow = any(point.overflowed for point in answer.points)
    return (
        "miss/unique: of the distinct rows of a batch; compulsory (first use, no read needed): "
        f"{compulsory:.4f}; capacity: without these. IO: one 4 KiB read per capacity miss, "
        f"{answer.iops:,.0f} reads/s here."
        + (" !: some batches alone do not fit; their last rows use overflow slots." if overflow else "")
    )


def show_tables(tables: list[TableCurve], sizes: list[Size], prepared: PreparedTrace) -> None:
    from rich.console import Console
    from rich.table import Table

    shares = [size for size in sizes if size.unit == "%"] or sizes[:0]
    grid = Table(title="each table alone, LRU: capacity misses per unique row", title_justify="left")
    for column in ("table", "rows used", "unique/batch", "accesses/batch", *(size.text for size in shares)):
        grid.add_column(column, justify="left" if column == "table" else "right")
    for table in tables:
        rows = [max(1.0, table.footprint * size.number / 100) for size in shares]
        ratios = table.curve.capacity_miss_ratio(rows)
        grid.add_row(
            printable(table.name),
            f"{table.footprint:,}",
            f"{table.uniques:,.0f}",
            f"{table.accesses:,.0f}",
            *(f"{max(0.0, ratio):.4f}" for ratio in ratios),
        )
    width = None if sys.stdout.isatty() else 120
    Console(file=sys.stdout, highlight=False, markup=False, width=width).print(grid)


@dataclass(frozen=True)
class Advice:
    """The smallest budget whose capacity misses are at most one in a hundred unique rows, and its policy."""

    policy: str
    size_rows: int
    size_bytes: int
    hit_rate_per_access: float
    hit_rate_per_unique: float
    capacity_miss_ratio: float
    ssd_reads_per_s: float
    text: str


def recommend(answer: Answer, policies: list[Policy], args: Any, bars: Any) -> Advice:
    """Search the size for each policy by halving its logarithm; the policy with the least bytes wins."""
    from tierstore.cache.tiers.sizes import bytes_for

    rate = answer.points[0].rate
    step = bars("searching", len(policies) * _STEPS)
    best: tuple[int, Policy, Point] | None = None
    for i, policy in enumerate(policies):
        low, high = 1, answer.trace.footprint + answer.trace.largest_batch
        found = None
        for k in range(_STEPS):
            middle = max(1, round((low * high) ** 0.5))
            (point,) = simulate_one(args, answer.trace, policy, [middle], rate, None)
            if point.capacity_miss_ratio <= _GOAL and not point.overflowed:
                found, high = point, middle
            else:
                low = middle
            step(i * _STEPS + k + 1)
        if found is None:
            (found,) = simulate_one(args, answer.trace, policy, [high], rate, None)
        cost = bytes_for(found.size_rows, answer.row_bytes, policy)
        if best is None or cost < best[0]:
            best = (cost, policy, found)
    assert best is not None
    return _advice(answer, *best)


def _advice(answer: Answer, size_bytes: int, policy: Policy, point: Point) -> Advice:
    trace = answer.trace
    reads = point.capacity_miss_ratio * trace.uniques / trace.batches
    per_s = reads * answer.examples_per_s / answer.examples_per_batch
    share = point.size_rows / trace.footprint
    window = f" and a window of {point.window} batches" if policy.uses_window else ""
    verdict = ", so it would hold training up." if per_s > answer.iops else "."
    text = (
        f"Recommended: {format_bytes(size_bytes)} of fast memory ({point.size_rows:,} rows of "
        f"{answer.row_bytes} bytes, {share:.1%} of the rows used) with policy {policy.name}{window}. It is "
        f"the smallest budget that comes within 1 % of all rows in memory: {1 - point.miss_ratio:.2%} "
        f"of the accesses and {1 - point.unique_miss_ratio:.2%} of each batch's distinct rows are there when "
        f"the batch comes; {point.capacity_miss_ratio:.2%} have to be read back. At "
        f"{answer.examples_per_s:,.0f} examples/s these are {per_s:,.0f} SSD reads/s; this device does "
        f"{answer.iops:,.0f}{verdict}"
    )
    return Advice(
        policy.name, point.size_rows, size_bytes, 1 - point.miss_ratio, 1 - point.unique_miss_ratio,
        point.capacity_miss_ratio, per_s, text,
    )  # fmt: skip


def to_json(answer: Answer, advice: Advice | None, tables: list[TableCurve] | None) -> dict[str, Any]:
    trace = answer.trace
    document: dict[str, Any] = {
        "source": answer.source,
        "batches": trace.batches,
        "accesses": trace.accesses,
        "uniques": trace.uniques,
        "footprint": trace.footprint,
        "row_bytes": answer.row_bytes,
        "rate": answer.points[0].rate,
        "results": [
            _result(point)
            | {
                "size_bytes": answer.size_bytes[point.policy, point.size_rows],
                "io_seconds_per_batch": io_seconds(answer, point),
            }
            for point in answer.points
        ],
        "floors": {
            "belady": [
                _result(point) | {"io_seconds_per_batch": io_seconds(answer, point)}
                for _, point in sorted(answer.belady.items())
            ],
            "compulsory_unique_miss_ratio": trace.footprint / trace.uniques,
            "reads_per_s": answer.iops,
        },
    }
    if advice:
        document["recommendation"] = asdict(advice)
    if tables:
        document["tables"] = {
            table.name: {
                "footprint": table.footprint,
                "uniques_per_batch": table.uniques,
                "accesses_per_batch": table.accesses,
                "lru": _curve(table),
            }
            for table in tables
        }
    return document


def _result(point: Point) -> dict[str, Any]:
    return {
        "policy": point.policy,
        "size_rows": point.size_rows,
        "window": point.window,
        "miss_ratio": point.miss_ratio,
        "unique_miss_ratio": point.unique_miss_ratio,
        "capacity_miss_ratio": point.capacity_miss_ratio,
        "overflowed_rows": point.overflowed,
    }


def _curve(table: TableCurve) -> list[dict[str, float]]:
    shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    sizes = [max(1.0, table.footprint * share) for share in shares]
    ratios = table.curve.capacity_miss_ratio(sizes)
    return [
        {"size_rows": round(size), "capacity_miss_ratio": max(0.0, float(ratio))}
        for size, ratio in zip(sizes, ratios, strict=True)
    ]
