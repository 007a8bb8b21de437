"""The page of measurements can be read: records are tables, and no cell is a dump of JSON."""

from __future__ import annotations

import json
from pathlib import Path

from docs.generate.measurements import RESULTS, cell, page, tables


def test_records_and_systems_are_tables() -> None:
    figures = {
        "options": {"rows": 3},
        "ratio": {"ours": 0.77779, "rounds": [1, 2.5]},
        "systems": {"a": {"ms": {"cpu": 1.25}, "steady": True}, "b": {"ms": {"cpu": 123456.7}}},
        "plans": [{"ranks": 2, "why": None}, {"ranks": 4, "why": "one|giant"}],
    }
    assert list(tables(figures)) == [
        (["figure", "value"], [["ratio.ours", 0.77779], ["ratio.rounds", [1, 2.5]]]),
        (["systems", "a", "b"], [["ms.cpu", 1.25, 123456.7], ["steady", True, None]]),
        (["ranks", "why"], [[2, None], [4, "one|giant"]]),
    ]


def test_figures_have_the_digits_that_say_something() -> None:
    given = {0.77779: "0.7778", 123456.7: "123,457", 1234567: "1,234,567", True: "yes", None: "", "x": "x"}
    assert {value: cell(value) for value in given} == given
    assert cell([1, 2.5, float("inf")]) == "1, 2.5, inf"


def test_every_result_is_on_the_page(tmp_path: Path) -> None:
    lines = page().splitlines()
    assert sum(line.startswith("### ") for line in lines) == len(list(RESULTS.glob("*.json")))
    cells = [one for line in lines if line.startswith("|") for one in line.split(" | ")]
    assert not [one for one in cells if "{" in one or len(one) > 300]
    about = {"cores": 2, "cpu": "c", "memory": "1 GiB", "system": "s", "python": "3", "torch": "2"}
    result = {"subject": "S", "title": "T", "command": "run", "date": "2026-01-02", "commit": "abc"}
    (tmp_path / "one.json").write_text(json.dumps({**result, "machine": about, "figures": {"x": 1}}))
    assert "## S\n\n### T\n" in page(tmp_path)
    assert "| x | 1 |" in page(tmp_path)
