"""Access logs: which columns are tables, JSON lines, and MLPerf's multi-hot arrays."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest

from tierstore.cli.main import main
from tierstore.errors import ConfigError, InputError
from tierstore.keys import make_keys
from tierstore.trace import open_trace
from tierstore.trace.columns import ColumnsNeeded, looks_like_ids
from tierstore.trace.options import add_source, open_source

LOG = """\
user_id,item_id,event_time,price,label
7,31,1700000000,9.99,1
8,31,1700000004,0.5,0
7,32,1700000009,3,0
"""


def log(folder: Path) -> Path:
    (folder / "log.csv").write_text(LOG)
    return folder / "log.csv"


def ids_of(path: Path, batch_size: int = 2, **options) -> list[list[list[int]]]:
    return [
        [ids.tolist() for ids in batch]
        for batch in open_trace(path, batch_size=batch_size, **options).id_batches()
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def opened(*arguments: object):
    parser = argparse.ArgumentParser()
    add_source(parser)
    return open_source(parser.parse_args([str(argument) for argument in arguments]))


def test_several_columns_are_listed_and_none_is_taken(tmp_path):
    with pytest.raises(ColumnsNeeded) as raised:
        open_trace(log(tmp_path))
    text = str(raised.value)
    for line in ("user_id     7, 8 ...", "event_time  1700000000, 1700000004, 1700000009 ...", "label"):
        assert line in text
    assert "for instance --columns user_id,item_id; --columns all takes every column" in text


def test_the_command_says_what_to_give(tmp_path, capsys):
    assert main(["trace", "describe", str(log(tmp_path))]) != 0
    error = capsys.readouterr().err
    assert "--columns user_id,item_id" in error
    assert "Traceback" not in error
    assert main(["trace", "describe", str(log(tmp_path)), "--columns", "user_id, item_id"]) == 0


def test_chosen_columns(tmp_path):
    assert ids_of(log(tmp_path), columns=["item_id", "user_id"]) == [[[31, 31], [7, 8]], [[32], [7]]]
    (tmp_path / "one.csv").write_text("user\n5\n6\n")
    assert ids_of(tmp_path / "one.csv") == [[[5, 6]]]


def as_csv(path: Path) -> None:
    path.write_text(LOG)


def as_lines(path: Path) -> None:
    header, *rows = (line.split(",") for line in LOG.splitlines())
    values = [[json.loads(value) for value in row] for row in rows]
    write_lines(path, [dict(zip(header, row, strict=True)) for row in values])


def arrays_of_log() -> dict[str, np.ndarray]:
    header, *rows = (line.split(",") for line in LOG.splitlines())
    columns = zip(*([json.loads(value) for value in row] for row in rows), strict=True)
    return {name: np.array(column) for name, column in zip(header, columns, strict=True)}


def as_arrays(path: Path) -> None:
    np.savez(path, **arrays_of_log())


def as_multi_hot(path: Path) -> None:
    arrays = arrays_of_log()
    np.savez_compressed(path, **{**arrays, "item_id": np.stack([arrays["item_id"]] * 2, axis=1)})


def as_parquet(path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(arrays_of_log()), path)


KINDS = {
    "log.csv": as_csv,
    "log.jsonl": as_lines,
    "log.parquet": as_parquet,
    "log.npz": as_arrays,
    "multi_hot.npz": as_multi_hot,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", [["trace", "describe"], ["bench", "hit-rate"]], ids=" ".join)
def test_every_kind_of_log_lists_its_columns_and_takes_none(tmp_path, monkeypatch, capsys, kind, command):
    KINDS[kind](tmp_path / kind)
    assert main([*command, str(tmp_path / kind)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / kind} has columns:\n  user_id     7, 8 ...\n")
    assert "--columns user_id,item_id; --columns all takes every column" in error
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    monkeypatch.setattr("sys.stderr", screen)
    assert opened(tmp_path / kind).tables == ("user_id", "item_id")
    assert screen.getvalue().endswith("Which of them are ids of tables? [user_id,item_id] ")
    assert "event_time  1700000000, 1700000004, 1700000009 ..." in screen.getvalue()


def test_a_log_does_not_write_to_the_terminal(tmp_path, capsys):
    (tmp_path / "log.csv").write_text("user,\x1b[31mfilm\n\x1b[2J1,2\n")
    assert main(["trace", "describe", str(tmp_path / "log.csv")]) == 2
    error = capsys.readouterr().err
    assert "?[31mfilm" in error
    assert "\x1b[2J" not in error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a\n1\n\xff\n", "is no text: 'utf-8' codec"),
        ("a.csv.gz", gzip.compress(b"a\n1\n", mtime=0)[:-9], "is no text: "),
        ("a.csv.gz", b"x", "is no text: Not a gzipped file"),
        ("a.csv", b'a\n"' + b"1" * 200_000 + b'"\n', "is no text: field larger than field limit"),
        ("a.txt", b"1\n\xff\n", "a line is no id"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        open_trace(tmp_path / name, columns=None if name == "a.txt" else ["all"])
    assert str(raised.value).startswith(str(tmp_path / name))


def test_arrays_that_all_look_like_ids_are_taken(tmp_path):
    np.savez(tmp_path / "a.npz", user=np.arange(3), film=np.arange(3))
    assert open_trace(tmp_path / "a.npz").tables == ("user", "film")
    assert open_trace(tmp_path / "a.npz", columns=["film"]).tables == ("film",)
    np.savez(tmp_path / "b.npz", user=np.arange(3), film=np.array([0, 1, -1]))
    with pytest.raises(ColumnsNeeded, match="--columns user;"):
        open_trace(tmp_path / "b.npz")


@pytest.mark.parametrize(("answer", "tables"), [("\n", ("user_id", "item_id")), ("label\n", ("label",))])
def test_a_terminal_is_asked(tmp_path, monkeypatch, answer, tables):
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", screen)
    assert opened(log(tmp_path)).tables == tables
    assert "Which of them are ids of tables? [user_id,item_id]" in screen.getvalue()


def test_what_is_no_terminal_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("label\n"))
    with pytest.raises(ConfigError, match="--columns"):
        opened(log(tmp_path))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["user"], "no column 'user'; there are user_id, item_id"),
        (["user_id", "user_id"], "'user_id' is named twice"),
        (["user_id", ""], "no column ''"),
    ],
)
def test_wrong_columns(tmp_path, columns, message):
    with pytest.raises(ConfigError, match=message):
        open_trace(log(tmp_path), columns=columns)


@pytest.mark.parametrize(
    ("text", "message"),
    [("1,2\n3,4\n", "has no header: its first line is 1,2"), ("a,a\n1,2\n", "names a column twice")],
)
def test_headers(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        open_trace(tmp_path / "a.csv", columns=["all"])


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("user", ["1", "2"], True),
        ("items", ["x", "y"], True),
        ("candidate", ["1"], True),
        ("timestamp", ["1"], False),
        ("created_at", ["1"], False),
        ("amount", ["1"], False),
        ("x", ["0.5"], False),
        ("x", [-3], False),
        ("x", [1e-05], False),
        ("x", [1e22], False),
        ("x", [float("nan")], False),
        ("infinity", ["inf"], False),
        ("x", ["1e"], True),
    ],
)
def test_what_looks_like_ids(name, values, expected):
    assert looks_like_ids(name, values) == expected


# -- JSON lines ------------------------------------------------------------------------------------

LINES = [
    {"user": 7, "films": [3, 4, 3], "tag": "x"},
    {"user": 8, "films": [], "tag": None, "later": 1},
    {"user": 7, "tag": "y"},
]


def write_lines(path: Path, lines: list[object]) -> Path:
    text = "\n\n".join(map(json.dumps, lines)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_json_lines(tmp_path, name):
    path = write_lines(tmp_path / name, LINES)
    expected = [[[7, 8], [3, 4, 3], [0]], [[7], [], [1]]]
    assert ids_of(path, columns=["user", "films", "tag"]) == expected
    assert open_trace(path, columns=["later", "user"]).tables == ("later", "user")
    keys = [batch.tolist() for batch in open_trace(path, batch_size=3, columns=["films"]).key_batches()]
    assert keys == [make_keys(0, [3, 4, 3]).tolist()]
    with pytest.raises(ColumnsNeeded, match="--columns user,films,tag"):
        open_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": 0.5}\n', "line 2: a is 0.5; ids are integers, strings"),
        ('{"a": true}\n', "a is true"),
        ('{"a": [1, [2]]}\n', r"a is \[2\]"),
        ('{"a": -1}\n', "ids are from 0"),
        ('{"a": 18446744073709551616}\n', r"ids are from 0 to 2\^64 - 1"),
        ('{"a": 1}\n{"a": "x"}\n', 'line 2: a is "x"; other ids of this field'),
        ('{"a": 1}\n{"a": 2\n', "line 2 is no JSON"),
        ("[1]\n", r"line 1 is \[1\]; each line must be an object"),
        ("\n", "is empty"),
        ('{"a": null}\n', "no line has an id"),
    ],
)
def test_json_lines_that_are_wrong(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        open_trace(tmp_path / "a.jsonl")


# -- MLPerf ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_multi_hot_arrays(tmp_path, save):
    rng = np.random.default_rng(0)
    arrays = {str(t): rng.integers(0, 1000, (7, hot)).astype(np.int32) for t, hot in enumerate((3, 1, 12))}
    save(tmp_path / "day_0_sparse_multi_hot.npz", **arrays, single=np.arange(7))
    path = tmp_path / "day_0_sparse_multi_hot.npz"
    trace = open_trace(path, batch_size=3)
    assert trace.tables == ("0", "1", "2", "single")
    assert trace.num_batches == 3
    for _ in range(2):  # every pass reads anew
        found = ids_of(path, 3)
        for number, begin in enumerate((0, 3, 6)):
            expected = [array[begin : begin + 3].reshape(-1).tolist() for array in arrays.values()]
            assert found[number][:3] == expected
    assert open_trace(path, batch_size=4, batches=1).num_batches == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones((3, 2), np.int64), "b": np.ones((4, 2), np.int64)}, "equally many examples"),
        ({"a": np.ones((3, 2)), "b": np.ones((3, 2))}, "a is float64; ids must be integers"),
        ({"a": np.full((3, 2), "x"), "b": np.ones((3, 2), np.int64)}, "a is <U1; ids must be integers"),
        ({"a": np.ones((3, 2), np.int64).T.copy().T, "b": np.ones((3, 2), np.int64)}, "in C order"),
        (
            {"a": np.ones((3, 2, 2), np.int64), "b": np.ones((3, 2), np.int64)},
            r"must be \(examples, ids\)",
        ),
        ({"a": np.ones((0, 2), np.int64), "b": np.ones((0, 2), np.int64)}, "is empty"),
    ],
)
def test_multi_hot_arrays_that_are_wrong(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        open_trace(tmp_path / "a.npz", columns=["all"])


def test_damaged_multi_hot_arrays(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.arange(20_000).reshape(-1, 2), b=np.arange(10_000))
    data = bytearray(path.read_bytes())
    data[1000] ^= 255
    path.write_bytes(data)
    with pytest.raises(InputError, match="a is damaged"):
        ids_of(path, 4096)


if importlib.util.find_spec("pyarrow"):

    def test_parquet_lists_its_columns(tmp_path):
        import pyarrow
        import pyarrow.parquet

        columns = {"user": [1, 2], "films": [[1, 2], []], "price": [0.5, 1.0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        with pytest.raises(ColumnsNeeded, match="--columns user,films; "):
            open_trace(tmp_path / "a.parquet")
        assert ids_of(tmp_path / "a.parquet", columns=["films", "user"]) == [[[1, 2], [1, 2]]]
