"""``tierstore verify``, ``commits``, ``export``, ``import``, ``compact`` and ``inspect --json``: what they
print, their exit codes, stores that are damaged, in use, sharded, or none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tierstore.cli.main import main
from tierstore.cli.storage import run_while_waiting
from tierstore.keys import make_keys
from tierstore.store import StoredTable, open_store

TABLES = [
    StoredTable("users", 0, 10**9, 60, 256, {"name": "rowwise_adagrad"}),
    StoredTable("items", 1, 1000, 8, 48),
]
ROWS = 3000


def write(store, version: int, rows: int = ROWS) -> None:
    store.write(make_keys(0, np.arange(rows)), np.full((rows, 256), version, np.uint8))
    store.write(make_keys(1, np.arange(9)), np.full((9, 48), version, np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A native store with a commit tagged ``best`` and one after it."""
    with open_store(tmp_path / "store", "native", TABLES, 16 << 20) as store:
        write(store, 1)
        store.commit(b'{"extra": {"step": 7}}', tag="best")
        write(store, 2)
        store.commit(b'{"extra": {"step": 8}}')
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def result(capsys: pytest.CaptureFixture[str], *arguments: object) -> object:
    code, output, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(output)


def damage(folder: Path) -> Path:
    """Overwrites some of the rows."""
    file = max((folder / "native").glob("*.seg"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[20_000:20_100] = b"\xee" * 100
    file.write_bytes(data)
    return file


def test_verify(folder, capsys):
    code, output, _ = run(capsys, "verify", folder)
    assert code == 0
    assert "6,018 row versions, kept commits: 1, 2" in output
    assert "intact" in output
    report = result(capsys, "verify", folder)
    assert (report["ok"], report["damage"], report["rows"]) == (True, [], 6018)


def test_verify_of_a_damaged_store_exits_1(folder, capsys):
    file = damage(folder)
    (folder / "native" / "99999999.seg").touch()
    code, output, _ = run(capsys, "verify", folder)
    assert code == 1
    assert f"native/{file.name}, offset " in output
    assert "checksum mismatch" in output
    assert "commits: " in output
    assert "What to do:\n  Rows are lost. Restore" in output
    assert "note: 99999999.seg: left by a crash" in output
    code, output, _ = run(capsys, "verify", folder, "--json")
    assert code == 1
    assert not json.loads(output)["ok"]


def test_commits(folder, capsys):
    code, output, _ = run(capsys, "commits", folder)
    assert code == 0
    assert "best" in output
    assert "step: 8" in output
    first, second = result(capsys, "commits", folder)
    assert (first["id"], first["tag"], first["meta"]) == (1, "best", {"step": 7})
    assert (second["id"], second["tag"]) == (2, "")
    with open_store(folder) as store:
        write(store, 9)
        assert len(result(capsys, "commits", folder)) == 2  # in use: listed all the same
        assert "in use" in run(capsys, "commits", folder)[1]
        code, _, errors = run(capsys, "commits", folder, "--drop", "best")
        assert code == 2
        assert "in use" in errors
    assert [c["id"] for c in result(capsys, "commits", folder, "--drop", "best")] == [2]
    code, _, errors = run(capsys, "commits", folder, "--drop", "2")
    assert code == 2
    assert "newest" in errors
    code, _, errors = run(capsys, "commits", folder, "--drop", "best")
    assert "a commit tagged 'best' is not kept; kept commits: 2" in errors


@pytest.mark.parametrize("meta", [b"\xff\xfe", b"[" * 100_000])
def test_commits_and_inspect_take_any_meta(meta, folder, capsys):
    """Other programs that use a store commit bytes of their own."""
    with open_store(folder) as store:
        store.commit(meta)
    assert result(capsys, "commits", folder)[-1]["meta"] == f"{len(meta)} bytes that are not tierstore's own"
    assert run(capsys, "inspect", folder)[0] == 0


def test_tags_of_digits(tmp_path, capsys):
    """Commit 1 is tagged 2, commit 2 has no tag, and commit 3 is tagged 2024."""
    folder = tmp_path / "store"
    with open_store(folder, "native", TABLES, 16 << 20, keep=9) as store:
        for version, tag in enumerate(["2", None, "2024"], start=1):
            write(store, version, rows=version)
            store.commit(b"{}", tag=tag)
    for name, rows in [("tag:2", 1), ("number:2", 2), ("tag:2024", 3), ("3", 3), ("number:1", 1)]:
        found = result(capsys, "inspect", folder, "--count", "--at", name)
        assert found["tables"][0]["rows"] == rows
        exported = result(capsys, "export", folder, tmp_path / name, "--at", name)
        assert exported["rows"] == rows + 9
    ambiguous = "2 is the number of a commit and the tag of another; say number:2 or tag:2"
    hint = "commit 2024 is not kept; a commit tagged '2024' is: say tag:2024 on the command line"
    for name, message in [("2", ambiguous), ("2024", hint)]:
        for command in (["inspect", folder, "--at"], ["export", folder, tmp_path / "x", "--at"]):
            code, _, errors = run(capsys, *command, name)
            assert (code, message in errors) == (2, True)
        code, _, errors = run(capsys, "commits", folder, "--drop", name)
        assert (code, message in errors) == (2, True)
    assert [c["id"] for c in result(capsys, "commits", folder, "--drop", "tag:2")] == [2, 3]
    assert not (tmp_path / "x").exists()


def test_export_and_import(folder, tmp_path, capsys):
    code, output, _ = run(capsys, "export", folder, tmp_path / "copy")
    assert code == 0
    assert "3,009 rows of 2 tables" in output
    exported = result(capsys, "export", folder, tmp_path / "older", "--at", "best")
    assert exported["rows"] == 3009
    assert run(capsys, "import", tmp_path / "copy", tmp_path / "again")[0] == 0
    made = result(capsys, "import", tmp_path / "older", tmp_path / "other", "--engine", "memory")
    assert (made["rows"], made["commit"], made["engine"]) == (3009, 1, "memory")
    for name, version in (("again", 2), ("other", 1)):
        with open_store(tmp_path / name, read_only=True) as store:
            out = np.zeros((ROWS, 256), np.uint8)
            assert store.read(make_keys(0, np.arange(ROWS)), out).all()
            assert (out == version).all()
    code, _, errors = run(capsys, "export", folder, tmp_path / "copy")
    assert code == 2
    assert "exists already" in errors
    code, _, errors = run(capsys, "import", tmp_path / "older", tmp_path / "new", "--ssd", "100KiB")
    assert code == 2
    assert "cap" in errors
    assert not (tmp_path / "new").exists()
    code, _, errors = run(capsys, "import", folder, tmp_path / "new")
    assert code == 2
    assert "is not an export: it has no EXPORT.json" in errors


def test_a_store_is_not_exported_into_itself(folder, capsys):
    before = sorted(folder.iterdir())
    code, output, errors = run(capsys, "export", folder, folder / "inside")
    assert (code, output) == (2, "")
    assert f"TARGET {folder / 'inside'} is in the folder that is exported; give another path" in errors
    assert sorted(folder.iterdir()) == before


def test_export_of_a_damaged_store_leaves_nothing(folder, tmp_path, capsys):
    damage(folder)
    code, _, errors = run(capsys, "export", folder, tmp_path / "copy")
    if code:
        assert ".seg: the record at offset" in errors
        assert os.listdir(tmp_path) == ["store"]


def test_a_store_whose_rows_are_gone_does_not_become_an_empty_one(folder, tmp_path, capsys):
    shutil.rmtree(folder / "native")
    for command in (["compact"], ["commits", "--drop", "best"]):
        code, output, errors = run(capsys, command[0], folder, *command[1:])
        assert (code, output) == (2, "")
        assert f"{folder / 'native'} is missing, which had the rows; restore a copy" in errors
    assert run(capsys, "verify", folder)[0] == 1
    assert run(capsys, "export", folder, tmp_path / "copy")[0] == 2
    assert sorted(os.listdir(folder)) == ["LOCK", "TIERSTORE.json"]


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb", "memory"])
def test_compact(tmp_path, capsys, engine):
    folder = tmp_path / "store"
    with open_store(folder, engine, TABLES, 64 << 20) as store:
        write(store, 1, 12_000)
        odd = np.arange(1, 12_000, 2)  # half of every segment
        store.write(make_keys(0, odd), np.full((6000, 256), 2, np.uint8))
        store.commit(b"meta", tag="kept")
    made = result(capsys, "compact", folder)
    assert made["bytes_after"] <= made["bytes_before"] + (1 << 16)
    if engine == "native":
        assert made["bytes_after"] < 0.8 * made["bytes_before"]
    with open_store(folder, at="kept", read_only=True) as store:
        assert len(store.commits()) == 1
        assert store.meta() == b"meta"
        out = np.zeros((12_000, 256), np.uint8)
        assert store.read(make_keys(0, np.arange(12_000)), out).all()
        assert (out[::2] == 1).all()
        assert (out[1::2] == 2).all()
    assert run(capsys, "verify", folder)[0] == 0
    assert run(capsys, "compact", folder)[0] == 0


def test_compact_keeps_other_commits_and_leaves_sharded_tables_alone(folder, tmp_path, capsys):
    code, output, _ = run(capsys, "compact", folder)
    assert code == 0
    assert "; an older commit keeps what it needs" in output
    assert [(c["tag"], c["meta"]["step"]) for c in result(capsys, "commits", folder)] == [
        ("best", 7),
        ("", 8),
    ]
    (tmp_path / "COMMIT.json").write_text("{}")
    code, _, errors = run(capsys, "compact", folder)
    assert code == 2
    assert "sharded" in errors


def test_inspect_as_json(folder, capsys):
    found = result(capsys, "inspect", folder, "--count", "--at", "best")
    assert (found["engine"], found["rows"], found["not_opened"]) == ("native", 3009, None)
    assert [(table["name"], table["rows"]) for table in found["tables"]] == [("users", ROWS), ("items", 9)]
    assert len(found["commits"]) == 2
    with open_store(folder):
        found = result(capsys, "inspect", folder)
    assert found["rows"] is None
    assert "in use" in found["not_opened"]


@pytest.mark.parametrize("command", ["verify", "commits", "inspect", "compact", "export"])
def test_what_is_no_store(tmp_path, capsys, command):
    (tmp_path / "notes.txt").write_text("mine")
    target = [tmp_path / "out"] if command == "export" else []
    code, output, errors = run(capsys, command, tmp_path, *target)
    assert code == 2
    assert output == ""
    assert "it has no TIERSTORE.json" in errors
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("command", ["verify", "compact", "export"])
def test_a_store_in_use(folder, tmp_path, capsys, command):
    target = [tmp_path / "out"] if command == "export" else []
    with open_store(folder):
        code, _, errors = run(capsys, command, folder, *target)
    assert code == 2
    assert "is in use by another object of this process" in errors


@pytest.mark.parametrize("command", ["verify", "commits", "inspect", "compact", "export", "import"])
def test_help_has_examples_and_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  tierstore {'import' if command == 'import' else command} " in text
    assert "exit codes: 0 done, 1 damage" in text
    assert max(map(len, text.splitlines())) <= 110


def test_ctrl_c_stops_the_work():
    closed = threading.Event()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    # Where tests run as a background job, SIGINT is ignored from the start.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_while_waiting("waiting", lambda: closed.wait(30), closed.set)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert closed.is_set()
    with pytest.raises(ZeroDivisionError):
        run_while_waiting("failing", lambda: 1 // 0, closed.set)


def test_on_a_terminal_there_is_a_bar(folder):
    """Through `script`, which gives the command a terminal."""
    import pty

    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "tierstore.cli", "verify", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=secondary, text=True) as child:
        os.close(secondary)
        shown = b""
        try:
            while part := os.read(primary, 4096):
                shown += part
        except OSError:
            pass
        output = child.stdout.read()
    os.close(primary)
    assert child.returncode == 0
    assert "intact" in output
    assert b"verifying" in shown
