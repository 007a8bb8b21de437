"""The page of measurements, from the dated files under bench/results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"
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
    columns, rows = result.get("columns"), result.get("rows")
    if columns is None:
        columns, rows = ["figure", "value"], flat(result["figures"])
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""
    for note in result.get("notes", ()):
        yield f"- {note}"
    yield ""


def machine(about: dict[str, Any]) -> str:
    """Return the machine in words: cores, processor, memory, system and versions."""
    name = f"machine {about['name']}: " if "name" in about else ""
    memory = about.get("memory") or f"{about['memory_bytes'] / 2**30:.0f} GiB"
    versions = f"Python {about['python']}, torch {about['torch']}"
    return f"{name}{about['cores']} cores of {about['cpu']}, {memory}, {about['system']}, {versions}"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts of nested JSON with dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value
