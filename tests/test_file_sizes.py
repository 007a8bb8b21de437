"""Files and functions stay short enough to be read at once, and the planner small."""

from __future__ import annotations

import ast

from tests.conftest import LONGEST_FIRST
from tests.source_files import FILES, ROOT, syntax

FOLDERS = ("tierstore", "cache_policies", "bench", "csrc", "examples", "tests")
# One stub describes the whole native module, so .pyi is left out.
SUFFIXES = {".py", ".cc", ".h", ".cuh", ".cu"}
MOST = 400
MOST_OF_FUNCTIONS = 26  # lines that at most a twentieth of the functions pass
PLANNERS_TOOLS = ("bound", "cluster", "plan", "plan_vs_torchrec", "their_plan", "trained", "training")
MOST_OF_PLANNER = 3600


def test_files_have_at_most_400_lines() -> None:
    files = [path for top in FOLDERS for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES]
    assert len(files) > 500
    lines = {path.relative_to(ROOT): path.read_text().count("\n") for path in files}
    assert not {str(path): count for path, count in lines.items() if count > MOST}


def test_most_functions_fit_a_screen() -> None:
    functions = [
        node for path in FILES.values() for node in syntax(path) if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 3000
    long = [node.name for node in functions if node.end_lineno - node.lineno >= MOST_OF_FUNCTIONS]
    assert len(long) <= len(functions) / 20


def test_the_planner_and_its_tools_are_small() -> None:
    files = [*(ROOT / "tierstore/planner").glob("*.py")]
    files += [ROOT / f"bench/research/{name}.py" for name in PLANNERS_TOOLS]
    assert sum(path.read_text().count("\n") for path in files) <= MOST_OF_PLANNER


def test_files_that_are_begun_first_are_there() -> None:
    assert [name for name in LONGEST_FIRST if not (ROOT / name).is_file()] == []
