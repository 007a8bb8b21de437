"""Draw ``tiers.svg``: the window of announced batches, and the tiers that rows move between.

Run ``python docs/pictures/tiers.py`` after a change, and look at the picture.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, GREY = "#1f2933", "#6b7785"
HOT, WARM, COLD, BATCH = "#f3a683", "#f8d9a0", "#b8d4ea", "#e8ebef"


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], colour: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(corner, *size, boxstyle=style, facecolor=colour, edgecolor=INK, linewidth=1)
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=INK))


def draw_window(axes: Axes) -> None:
    names = ["computes", "planned,\nfetched", "announced", "announced", "announced", "not known"]
    for i, name in enumerate(names):
        left = 0.4 + 1.95 * i
        box(
            axes,
            (left, 6.35),
            (1.7, 0.95),
            HOT if i == 0 else WARM if i == 1 else "white" if i == 5 else BATCH,
        )
        label = "batch i" if i == 0 else f"batch i+{i}" if i < 5 else "later"
        axes.text(left + 0.85, 7.08, label, ha="center", va="center", weight="bold", color=INK)
        axes.text(left + 0.85, 6.67, name, ha="center", va="center", size=8.5, color=GREY, linespacing=1.1)
    axes.annotate("", (0.4, 7.6), (9.9, 7.6), arrowprops={"arrowstyle": "<->", "color": GREY})
    axes.text(5.15, 7.83, "window: batches whose ids are known", ha="center", color=GREY)
    axes.annotate("", (2.35, 6.1), (4.05, 6.1), arrowprops={"arrowstyle": "<->", "color": GREY})
    axes.text(4.25, 6.1, "depth: batches fetched ahead", va="center", size=9, color=GREY)


def draw_tier(axes: Axes, bottom: float, width: float, colour: str, words: tuple[str, str, str]) -> None:
    box(axes, (0.4, bottom), (width, 1.05), colour)
    title, what, budget = words
    axes.text(0.65, bottom + 0.76, title, va="center", weight="bold", size=11, color=INK)
    axes.text(0.65, bottom + 0.3, what, va="center", size=9, color=INK)
    axes.text(12.0, bottom + 0.5, budget, va="center", ha="right", size=9, color=GREY, family="monospace")


def draw_rows(axes: Axes, bottom: float, left: float, count: int) -> None:
    for i in range(count):
        axes.add_patch(
            Rectangle((left + 0.2 * i, bottom + 0.62), 0.14, 0.28, facecolor="white", edgecolor=INK, lw=0.6)
        )


def main() -> None:
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "tierstore"})
    figure, axes = plt.subplots(figsize=(9.2, 6.1))
    axes.set(xlim=(0, 12.4), ylim=(-0.1, 8.1))
    axes.axis("off")
    draw_window(axes)
    draw_tier(axes, 4.2, 4.6, HOT, ("hbm", "kernels see slots of this tier only", 'hbm="1GiB"'))
    draw_tier(axes, 2.1, 6.2, WARM, ("uvm", "host memory, optional", 'uvm="8GiB"'))
    draw_tier(
        axes,
        0.0,
        7.8,
        COLD,
        ("ssd", "row store: changed rows that were demoted, and the commits", 'ssd="500GiB"'),
    )
    draw_rows(axes, 4.2, 1.6, 16)
    draw_rows(axes, 2.1, 1.6, 23)
    draw_rows(axes, 0.0, 1.6, 31)
    arrow(axes, (1.25, 6.3), (1.25, 5.3))
    axes.text(1.4, 5.65, "look up, update", va="center", size=9, color=INK)
    for bottom in (3.15, 1.05):
        arrow(axes, (1.9, bottom + 1.0), (1.9, bottom + 0.05))
        axes.text(1.75, bottom + 0.52, "demote", va="center", ha="right", size=9, color=INK)
        arrow(axes, (2.6, bottom + 0.05), (2.6, bottom + 1.0))
        axes.text(2.75, bottom + 0.52, "promote", va="center", size=9, color=INK)
    axes.plot([7.4, 7.4], [1.1, 4.75], color=INK, linestyle="--", linewidth=1)
    arrow(axes, (7.4, 4.75), (5.05, 4.75))
    axes.text(7.55, 3.15, "read ahead, for announced batches", va="center", size=9, color=INK)
    axes.annotate(
        "", (5.05, 5.1), (8.9, 6.3), arrowprops={"arrowstyle": "-|>", "color": GREY, "linestyle": ":"}
    )
    axes.text(8.0, 5.55, "the next use of each row\ndecides what stays", va="center", size=9, color=GREY)
    picture = Path(__file__).with_suffix(".svg")
    figure.savefig(picture, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
