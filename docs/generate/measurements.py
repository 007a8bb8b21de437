"""The page of measurements, from the dated files under bench/results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"
SAID_ABOVE = {"options", "machine", "date"}
"""Parts of a benchmark's file that the command and the line below it say."""
HEAD = """\
# Measurements

This page is made from the files under `bench/results/`; what is not here has not been measured.
Every figure has its command, machine and date. "commit not recorded" means that nobody wrote down
which commit was measured.
"""


def page(folder: Path = RESULTS) -> str:
    """Return the page, in Markdown: a section per subject, the newest results first."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    subjects = dict.fromkeys(result["subject"] for result in results)
    lines = [HEAD]
    for subject in sorted(subjects):
        own = [result for result in results if result["subject"] == subject]
        lines += [f"## {subject}", ""]
        for result in sorted(own, key=lambda result: result["date"], reverse=True):
            lines += section(result)
    return "\n".join(lines) + "\n"


def section(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one result."""
    commit = result["commit"] or "not recorded"
    yield f"### {result['title']}"
    yield ""
    yield f"```text\n{result['command']}\n```"
    yield ""
    about = [result["date"], f"commit {commit}", machine(result["machine"]), result.get("conditions")]
    yield "; ".join(filter(None, about)) + "."
    yield ""
    if "columns" in result:
        yield from table(result["columns"], result["rows"])
    else:
        for columns, rows in tables(result["figures"]):
            yield from table(columns, rows)
    for note in result.get("notes", ()):
        yield f"- {note}"
    yield ""


def machine(about: dict[str, Any]) -> str:
    """Return the machine in words: cores, processor, memory, system and versions."""
    name = f"machine {about['name']}: " if "name" in about else ""
    memory = about.get("memory") or f"{about['memory_bytes'] / 2**30:.0f} GiB"
    versions = f"Python {about['python']}, torch {about['torch']}"
    return f"{name}{about['cores']} cores of {about['cpu']}, {memory}, {about['system']}, {versions}"


def tables(figures: dict[str, Any]) -> Iterator[tuple[list[str], list[list[Any]]]]:
    """Yield the columns and rows of the figures of one result: single figures first, then a table of each
    list of records, and of each group of things that have the same figures, such as the systems compared."""
    single, others = [], []
    for name, value in figures.items():
        if name in SAID_ABOVE:
            continue
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            columns = list(dict.fromkeys(key for one in value for key in one))
            others.append((columns, [[one.get(key) for key in columns] for one in value]))
        elif isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values()):
            inner = {key: dict(flat(one)) for key, one in value.items()}
            figures_of_all = dict.fromkeys(figure for one in inner.values() for figure in one)
            rows = [[figure, *(one.get(figure) for one in inner.values())] for figure in figures_of_all]
            others.append(([name, *inner], rows))
        else:
            single += map(list, flat(value, name))
    if single:
        yield ["figure", "value"], single
    yield from others


def table(columns: list[str], rows: list[list[Any]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell(value).replace("|", "\\|") for value in row) + " |"
    yield ""


def cell(value: Any) -> str:
    """Return a figure in four digits, whole numbers with all of theirs, and nothing for what is missing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = abs(value) >= 10_000 and math.isfinite(value)
        return f"{round(value):,}" if whole else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    return "" if value is None else str(value)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the figures and texts of nested JSON with dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
