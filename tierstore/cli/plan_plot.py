"""A plan's report as a figure: tables stacked per tier and rank, and the seconds of the stages."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.config import format_bytes
from tierstore.errors import ConfigError

_PLOTS = ("png", "pdf", "svg")
_NAMED_TABLES = 9
"""Tables with a colour of their own; the rest are one stack."""
_LONGEST_NAME = 32
"""Characters of a table's name; the names take their width from the tiers."""
_RANKS, _HOSTS = 8, 4
"""Places whose stages are drawn, the slowest ones."""
_SHORTEST_S = 1e-9
"""Seconds of the longest stage of a place that is drawn at all: what is shorter is rounding."""
_TIERS = {"hbm": "hbm", "uvm": "host memory", "ssd": "ssd"}
_OTHERS, _BESIDE = "lightgray", "whitesmoke"


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


def drawn(report: Mapping[str, Any], form: str) -> bytes:
    """Draw a plan's report as a figure in the format ``form``."""
    from matplotlib import pyplot, rc_context

    file = io.BytesIO()
    # A table's name may have dollars, and characters that the font has not: these are drawn as boxes.
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = pyplot.figure(figsize=(12, 8.5), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[1.1, 1])
        upper, lower = parts
        for axes, tier in zip(upper.subplots(1, len(_TIERS)), _TIERS, strict=True):
            _draw_tier(axes, report, tier)
        bars = axes.get_legend_handles_labels()
        upper.legend(*bars, loc="outside right upper", title="tables, largest first")
        _draw_stages(lower.subplots(), report)
        figure.savefig(file, format=form)
        pyplot.close(figure)
    return file.getvalue()


def stacks_of(report: Mapping[str, Any], tier: str) -> dict[str, np.ndarray]:
    """Return the bytes of the largest tables in a tier, float64 (ranks,), by name and largest first; those of
    the other tables as "N others", and at last what is no table's as "beside tables"."""
    ranks, hosts = report["ranks"], report["hosts"]
    found: dict[str, np.ndarray] = {}
    totals: dict[str, int] = {}
    for table in report["tables"]:
        sizes = found[table["name"]] = np.zeros(len(ranks))
        for shard in table["shards"]:
            sizes[shard["rank"]] += shard[f"{tier}_bytes"]
        totals[table["name"]] = sum(shard[f"{one}_bytes"] for shard in table["shards"] for one in _TIERS)
    names = sorted(found, key=lambda name: -totals[name])
    stacks = {name: found[name] for name in names[:_NAMED_TABLES]}
    if rest := names[_NAMED_TABLES:]:
        others = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
        stacks[_unlike(stacks, others)] = np.sum([found[name] for name in rest], axis=0)
    if tier == "hbm":
        used = np.array([rank["hbm_bytes"] for rank in ranks], float)
    else:
        per_host, memory = len(ranks) // len(hosts), "host_memory" if tier == "uvm" else "ssd"
        tables = np.sum(list(found.values()), axis=0).reshape(len(hosts), per_host)
        beside = np.array([host[f"{memory}_bytes"] for host in hosts]) - tables.sum(axis=1)
        used = (tables + beside[:, None] / per_host).ravel()
    stacks[_unlike(stacks, "beside tables")] = np.maximum(used - np.sum(list(found.values()), axis=0), 0)
    return stacks


def _unlike(stacks: Mapping[str, np.ndarray], name: str) -> str:
    """Return ``name``, with spaces behind it where a table has that name."""
    while name in stacks:
        name += " "
    return name


def _draw_tier(axes: Any, report: Mapping[str, Any], tier: str) -> None:
    """Stack the tables of each rank."""
    from matplotlib import colormaps

    stacks, ranks = stacks_of(report, tier), np.arange(len(report["ranks"]))
    unit, name = _unit(float(np.sum(list(stacks.values()), axis=0).max()))
    colors, bottom = colormaps["tab10"], np.zeros(len(ranks))
    for number, (table, sizes) in enumerate(stacks.items()):
        beside = number == len(stacks) - 1
        color = _BESIDE if beside else _OTHERS if number >= _NAMED_TABLES else colors(number)
        look = {"hatch": "//", "edgecolor": "gray", "linewidth": 0} if beside else {}
        axes.bar(ranks, sizes / unit, 0.85, bottom / unit, label=_label(table), color=color, **look)
        bottom += sizes
    axes.set_title(f"{_TIERS[tier]}, {_fill(report, tier):.0%} full", fontsize=10)
    if not bottom.any():
        axes.text(0.5, 0.5, "nothing is here", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
        return
    axes.set(xlabel="rank", ylabel=name if tier == "hbm" else f"{name}, a rank's part of its host's")
    axes.set_ylim(0, 1.08 * bottom.max() / unit)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _label(table: str) -> str:
    """Return what the legend calls a table. Of a long name both ends are kept, as names differ at either."""
    if len(table) > _LONGEST_NAME:
        half = _LONGEST_NAME // 2
        table = f"{table[: half - 1]}…{table[-half:]}"
    return f" {table}" if table.startswith("_") else table  # matplotlib hides labels that begin with "_"


def _fill(report: Mapping[str, Any], tier: str) -> float:
    """Return the share of a tier that is used of the fullest rank's or host's."""
    if tier == "hbm":
        return float(max(rank["hbm_fill"] for rank in report["ranks"]))
    memory = "host_memory" if tier == "uvm" else "ssd"
    return float(max(host[f"{memory}_fill"] for host in report["hosts"]))


def _unit(most: float) -> tuple[float, str]:
    """Return the bytes of the unit in which ``most`` bytes are a readable number, and its name."""
    unit = format_bytes(int(most)).rpartition(" ")[2]
    names = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    return float(1024 ** names.index(unit)), unit


def _draw_stages(axes: Any, report: Mapping[str, Any]) -> None:
    """Draw the stages of the slowest ranks and hosts as bars, with the binding one marked."""
    groups = [*_slowest(report["ranks"], "rank", _RANKS), *_slowest(report["hosts"], "host", _HOSTS)]
    names = list(dict.fromkeys(name for _, seconds in groups for name in seconds if seconds[name]))
    width = 0.85 / max(1, len(names))
    for number, name in enumerate(names):
        at = [k + (number - (len(names) - 1) / 2) * width for k in range(len(groups))]
        heights = [1e3 * seconds.get(name, 0.0) for _, seconds in groups]
        axes.bar(at, heights, width, label=name.replace("_", " "), color=f"C{number}")
    if report["feasible"]:
        _mark_binding(axes, report, groups, (names, width))
        step = 1e3 * report["predicted_step_s"]
        axes.axhline(step, color="black", linewidth=1, linestyle=":", label=f"step, {step:.3g} ms")
    few = len(report["ranks"]) > _RANKS or len(report["hosts"]) > _HOSTS
    title = "predicted stages" + (" of the slowest ranks and hosts" if few else "")
    axes.set(title=title, ylabel="ms per step", xticks=range(len(groups)))
    axes.set_xticklabels([place for place, _ in groups])
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _mark_binding(
    axes: Any,
    report: Mapping[str, Any],
    groups: Sequence[tuple[str, Mapping[str, float]]],
    bars: tuple[list[str], float],
) -> None:
    """Frame the bar of the binding stage, and say that it sets the step."""
    (names, width), binding = bars, report["binding"]
    if binding not in names:
        return
    places = [place for place, seconds in groups if binding in seconds]
    place = max(places, key=lambda one: dict(groups)[one][binding])
    at = [one for one, _ in groups].index(place) + (names.index(binding) - (len(names) - 1) / 2) * width
    height = 1e3 * dict(groups)[place][binding]
    axes.bar([at], [height], width, color="none", edgecolor="black", linewidth=2.5)
    axes.annotate(
        f"{binding.replace('_', ' ')} of {place} sets the step: {height:.3g} ms",
        (at, height),
        (0, 6),
        textcoords="offset points",
        fontweight="bold",
        ha="left" if at < (len(groups) - 1) / 2 else "right",
    )


def _slowest(
    places: Sequence[Mapping[str, Any]], kind: str, most: int
) -> list[tuple[str, Mapping[str, float]]]:
    """Return the slowest places with their stages, in the order of their numbers."""
    chosen = sorted(places, key=lambda place: -max(place["stage_seconds"].values()))[:most]
    if max(max(place["stage_seconds"].values()) for place in chosen) < _SHORTEST_S:
        return []
    chosen.sort(key=lambda place: place[kind])
    return [(f"{kind} {place[kind]}", place["stage_seconds"]) for place in chosen]
