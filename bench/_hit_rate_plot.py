"""The curves of ``tierstore bench hit-rate`` as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.config import format_bytes
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from ._hit_rate_answer import Answer

_FORMATS = (".png", ".svg", ".pdf", ".html")
# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker each for print in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX<>*"
_TICKS = 8
_ABOVE_CURVES = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
"""What a text stands on, so that curves behind it leave it readable."""


def check(path: Path) -> None:
    """Raise ConfigError, before the work begins, if a picture cannot be written to ``path``."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(_FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs the package matplotlib (pip install tierstore[plot])") from error


@dataclass(frozen=True)
class Mark:
    """A size in bytes that the picture points out."""

    text: str
    bytes: int


def draw(answer: Answer, path: Path, marks: Sequence[Mark]) -> None:
    """Draw capacity misses per unique row by bytes of memory, with Belady's bound shaded, and ``marks``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, PercentFormatter

    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    try:
        _curves(axes, answer)
        for number, mark in enumerate(sorted(marks, key=lambda mark: mark.bytes)):
            _draw_mark(axes, mark, number)
        axes.set_xscale("log", base=2)
        sizes = [*answer.size_bytes.values(), *_belady_bytes(answer), *(mark.bytes for mark in marks)]
        axes.set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
        ticks = byte_ticks(min(sizes), max(sizes))
        axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="memory of the cache", ylabel="distinct rows of a batch that are read back")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(answer.source, fontsize=10, parse_math=False)  # a path may have dollars
        _rows_on_top(axes, answer)
        _save(figure, path)
    finally:
        pyplot.close(figure)


def byte_ticks(low: int, high: int) -> list[int]:
    """Return powers of two from ``low`` to ``high``, at most ``_TICKS``; both ends where there is none."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / _TICKS))
    ticks = [1 << power for power in range(first, last + 1, step)]
    return ticks if len(ticks) > 1 else sorted({low, high})


def _draw_mark(axes: Any, mark: Mark, number: int) -> None:
    """Draw a line with its text, at another height than the line before it."""
    axes.axvline(mark.bytes, color="0.3", linestyle=("--", ":", "-.")[number % 3], linewidth=1.2)
    axes.annotate(
        f"{mark.text}: {format_bytes(mark.bytes)}", (mark.bytes, 0.97 - 0.45 * (number % 2)), (-3, 0),
        xycoords=("data", "axes fraction"), textcoords="offset points", rotation=90, va="top", ha="right",
        fontsize=8, color="0.2", zorder=3, bbox=_ABOVE_CURVES,
    )  # fmt: skip


def _rows_on_top(axes: Any, answer: Answer) -> None:
    """Draw a second axis of the share of the rows used, which are a little less than the bytes."""
    from matplotlib.ticker import LogFormatter

    each = float(np.median([size / rows for (_, rows), size in answer.size_bytes.items()]))
    used = answer.trace.footprint * each / 100
    top = axes.secondary_xaxis("top", (lambda size: size / used, lambda share: share * used))
    top.set_xlabel("share of the rows used", fontsize=8)
    top.xaxis.set_major_formatter("{x:g}%")

    class Shares(LogFormatter):
        """Labels of the ticks between powers of ten, which matplotlib gives to short axes alone."""

        def __call__(self, x: float, pos: Any = None) -> str:
            return f"{x:g}%" if super().__call__(x, pos) else ""

    top.xaxis.set_minor_formatter(Shares())


def _belady_bytes(answer: Answer) -> list[int]:
    """Return the bytes at which the bound is drawn: the bytes of the smallest policy with as many rows."""
    return [
        min(size for (_, rows), size in answer.size_bytes.items() if rows == bound)
        for bound in sorted(answer.belady)
    ]


def _curves(axes: Any, answer: Answer) -> None:
    bound = [answer.belady[size].capacity_miss_ratio for size in sorted(answer.belady)]
    pairs = sorted(zip(_belady_bytes(answer), bound, strict=True))
    sizes, bound = [size for size, _ in pairs], [ratio for _, ratio in pairs]
    axes.fill_between(sizes, bound, color="0.88", label="out of reach (Belady)", linewidth=0)
    axes.plot(sizes, bound, color="0.6", linewidth=1)
    names = list(dict.fromkeys(point.policy for point in answer.points))
    for i, name in enumerate(names):
        points = sorted((p for p in answer.points if p.policy == name), key=lambda p: p.size_rows)
        axes.plot(
            [answer.size_bytes[name, p.size_rows] for p in points],
            [p.capacity_miss_ratio for p in points],
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle="-" if i < len(_COLOURS) else "--",
            markersize=4,
            linewidth=1.3,
            label=name,
        )


def _save(figure: Any, path: Path) -> None:
    if path.suffix != ".html":
        figure.savefig(path, dpi=200)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg")
    picture = text.getvalue()
    picture = picture[picture.index("<svg") :]
    head = '<!doctype html><meta charset="utf-8"><title>miss ratios</title>'
    path.write_text(f'{head}\n<body style="margin:2em">{picture}</body>\n')
