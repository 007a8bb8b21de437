"""Files stay short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST_FIRST

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tierstore", "cache_policies", "bench", "csrc", "examples", "tests")
# One stub describes the whole native module, so .pyi is left out.
SUFFIXES = {".py", ".cc", ".h", ".cuh", ".cu"}
MOST = 400


def test_files_have_at_most_400_lines() -> None:
    files = [path for top in FOLDERS for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES]
    assert len(files) > 500
    lines = {path.relative_to(ROOT): path.read_text().count("\n") for path in files}
    assert not {str(path): count for path, count in lines.items() if count > MOST}


def test_files_that_are_begun_first_are_there() -> None:
    assert [name for name in LONGEST_FIRST if not (ROOT / name).is_file()] == []
