"""``tierstore inspect``: on a store, on one in use, on what is none."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tierstore.cli.main import main
from tierstore.keys import make_keys
from tierstore.store import DirectoryStore, StoredTable, open_store

TABLES = [
    StoredTable("users", 0, 10**12 >> 4, 8, 48, {"name": "rowwise_adagrad"}),
    StoredTable("items", 1, 1000, 8, 48, {"name": "rowwise_adagrad"}),
]


def filled_store(path: Path) -> DirectoryStore:
    store = open_store(path, "lmdb", TABLES, 1 << 30)
    store.write(make_keys(0, np.arange(5)), np.zeros((5, 48), np.uint8))
    store.write(make_keys(1, np.arange(2)), np.zeros((2, 48), np.uint8))
    store.commit(b'{"extra": {"batches": 7, "dense": ["a"]}}')
    return store


def files_of(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}


def test_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled_store(tmp_path).close()
    assert main(["inspect", str(tmp_path), "--count"]) == 0
    output = capsys.readouterr().out
    assert "engine lmdb" in output
    assert "rows: 7" in output
    assert "  batches: 7\n  dense: ['a']\n" in output
    users, items = (
        next(line.split() for line in output.splitlines() if name in line) for name in ("users", "items")
    )
    assert users == ["users", "62,500,000,000", "8", "48", "5", "rowwise_adagrad"]
    assert items[4] == "2"


@pytest.mark.parametrize("columns", [None, 80, 60])
def test_no_column_of_commits_is_cut(
    tmp_path: Path, columns: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, note = "checkpoint-e8b574ae-000001-step60-4d930b9d", "at-the-end-of-the-epoch"
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    with filled_store(tmp_path) as store:
        store.commit(f'{{"extra": {{"note": "{note}"}}}}'.encode(), tag=tag)
    assert main(["commits", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    if columns is None:
        assert sum(tag in line and note in line for line in lines) == 1
    else:
        assert max(map(len, lines)) <= columns
        tags, times, notes = (lines[1].index(title) for title in ("tag", "made at", "meta"))
        assert tag in "".join(line[tags:times].strip() for line in lines)
        assert note in "".join(line[notes:].strip() for line in lines)


def test_a_store_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with filled_store(tmp_path):
        before = files_of(tmp_path)
        assert main(["inspect", str(tmp_path)]) == 0
        assert files_of(tmp_path) == before
    output = capsys.readouterr().out
    assert f"rows: not read, since {tmp_path} is in use by another object of this process" in output
    assert "items" in output


def test_a_folder_that_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "it has no TIERSTORE.json" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("record", ["TIERSTORE.json", "COMMIT.json"])
def test_the_folder_of_a_checkpoint_names_the_one_of_its_rows(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / record).write_text("{}")
    assert main(["verify", str(tmp_path)]) == 2
    assert f"it has no TIERSTORE.json; give {tmp_path / 'rows'}, a folder" in capsys.readouterr().err


def test_a_terminal_obeys_no_name_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = StoredTable("a\x1b[2J[/b]", 0, 10, 8, 48, {"name": "sgd\x9b2J"})
    with open_store(tmp_path / "store", "native", [table], 1 << 30) as store:
        store.write(make_keys(0, np.arange(5)), np.zeros((5, 48), np.uint8))
        store.commit(b'{"extra": {"note": "\\u001b]0;x\\u0007\\ud800"}}', tag="best")
    for command in ("inspect", "commits", "verify"):
        assert main([command, str(tmp_path / "store")]) == 0
        output = capsys.readouterr().out
        assert all(char.isprintable() for char in output.replace("\n", ""))
        assert command == "verify" or "?]0;x??" in output
    assert main(["inspect", str(tmp_path / "store"), "--at", "\x1b[2J"]) == 2
    assert "tagged '?[2J'" in capsys.readouterr().err.replace("\\x1b", "?")
