"""The curves of ``tierstore bench hit-rate`` as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from ._hit_rate_answer import Answer

_FORMATS = (".png", ".svg", ".pdf", ".html")
# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker each for print in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX<>*"


def check(path: Path) -> None:
    """Raise ConfigError, before the work begins, if a picture cannot be written to ``path``."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(_FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs the package matplotlib (pip install tierstore[plot])") from error


def draw(answer: Answer, path: Path, marked_rows: int | None) -> None:
    """Draw capacity misses per unique row by size, with Belady's bound shaded; mark ``marked_rows``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    try:
        _curves(axes, answer)
        if marked_rows is not None:
            axes.axvline(marked_rows, color="0.3", linestyle="--", linewidth=1)
            size = format_bytes(marked_rows * answer.row_bytes)
            axes.annotate(
                f"{size} of rows", (marked_rows, 1), (3, -3), xycoords=("data", "axes fraction"),
                textcoords="offset points", rotation=90, va="top", fontsize=8, color="0.3",
            )  # fmt: skip
        axes.set(xscale="log", xlabel="cache size (rows)", ylabel="capacity misses per unique row of a batch")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(answer.source, fontsize=10)
        footprint = answer.trace.footprint
        top = axes.secondary_xaxis("top", (lambda x: 100 * x / footprint, lambda x: x * footprint / 100))
        top.set_xlabel("of the rows used", fontsize=8)
        top.xaxis.set_major_formatter("{x:g}%")
        _save(figure, path)
    finally:
        pyplot.close(figure)


def _curves(axes: Any, answer: Answer) -> None:
    sizes = sorted(answer.belady)
    bound = [answer.belady[size].capacity_miss_ratio for size in sizes]
    axes.fill_between(sizes, bound, color="0.88", label="out of reach (Belady)", linewidth=0)
    axes.plot(sizes, bound, color="0.6", linewidth=1)
    names = list(dict.fromkeys(point.policy for point in answer.points))
    for i, name in enumerate(names):
        points = sorted((p for p in answer.points if p.policy == name), key=lambda p: p.size_rows)
        axes.plot(
            [p.size_rows for p in points],
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
