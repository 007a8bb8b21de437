"""Traces in files of all kinds: what is read, and what is refused."""

from __future__ import annotations

import gzip
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore.errors import ConfigError, InputError
from tierstore.keys import make_keys
from tierstore.trace import TraceRecorder, open_trace
from tierstore.trace.files import ORACLE_GENERAL

IDS = np.array([5, 3, 5, 9, 3, 3, 7])


def keys_of(path, batch_size=3, **options) -> list[list[int]]:
    return [batch.tolist() for batch in open_trace(path, batch_size=batch_size, **options).key_batches()]


ONE_TABLE = [[5, 3, 5], [9, 3, 3], [7]]


def write_npy(path):
    np.save(path, IDS)


def write_npz(path):
    np.savez(path, ids=IDS.astype(np.uint16))


def write_text(path):
    path.write_text("\n".join(map(str, IDS)) + "\n")


def write_text_gz(path):
    path.write_bytes(gzip.compress("\n".join(map(str, IDS)).encode()))


def write_csv(path):
    path.write_text("id\n" + "\n".join(map(str, IDS)))


def write_oracle_general(path):
    requests = np.zeros(IDS.size, ORACLE_GENERAL)
    requests["id"] = IDS
    requests.tofile(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.npy", write_npy),
        ("a.npz", write_npz),
        ("a.txt", write_text),
        ("a.txt.gz", write_text_gz),
        ("a.csv", write_csv),
        ("a.oracleGeneral", write_oracle_general),
        ("a.oracleGeneral.bin", write_oracle_general),
    ],
)
def test_one_table_in_batches(tmp_path, name, write):
    write(tmp_path / name)
    assert keys_of(tmp_path / name) == ONE_TABLE
    assert keys_of(tmp_path / name, batches=1) == ONE_TABLE[:1]
    trace = open_trace(tmp_path / name, batch_size=3)
    assert (trace.num_batches, len(trace.tables)) == (3, 1)
    assert [b.tolist() for b in trace.key_batches()] == [b.tolist() for b in trace.key_batches()]  # read anew


def test_columns_are_tables(tmp_path):
    columns = np.array([[1, 2], [3, 4], [1, 6]])
    expected = [[*make_keys(0, columns[:2, 0]), *make_keys(1, columns[:2, 1])]]
    expected.append([*make_keys(0, [1]), *make_keys(1, [6])])
    np.save(tmp_path / "a.npy", columns)
    np.savez(tmp_path / "a.npz", a=columns[:, 0], b=columns[:, 1].astype(np.int8))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n1,6\n")
    for name, options in (("a.npy", {}), ("a.npz", {}), ("a.csv", {"columns": ["all"]})):
        assert keys_of(tmp_path / name, 2, **options) == expected
    assert open_trace(tmp_path / "a.csv", columns=["a", "b"]).tables == ("a", "b")
    assert keys_of(tmp_path / "a.csv", 5, columns=["b"]) == [[2, 4, 6]]


def test_pages_of_a_mapped_file_are_given_back_while_it_is_read(tmp_path):
    ids = np.random.default_rng(0).integers(0, 1000, 6 << 20)  # 48 MiB
    np.save(tmp_path / "a.npy", ids)
    trace = open_trace(tmp_path / "a.npy", batch_size=1 << 16)
    mapped = Path("/proc/self/smaps")
    most, found = 0, []
    for number, batch in enumerate(trace.key_batches()):
        found.append(batch)
        if number % 16 == 15:
            lines = mapped.read_text().splitlines()
            at = next(i for i, line in enumerate(lines) if line.endswith("a.npy"))
            most = max(most, next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:")))
    assert np.array_equal(np.concatenate(found), ids.astype(np.uint64))
    assert most <= 34 << 10  # kB: of 4 Mi ids


def test_words_in_csv_are_numbered_by_first_occurrence(tmp_path):
    (tmp_path / "a.csv").write_text('who,what\nann,"x,y"\nbob,v\nann,z\n')
    assert keys_of(tmp_path / "a.csv", 3, columns=["who", "what"]) == [[0, 1, 0, *make_keys(1, [0, 1, 2])]]


def test_empty_cells_of_csv_are_no_ids(tmp_path):
    """As nulls of parquet and of JSON lines; integers stay the ids that they are."""
    (tmp_path / "a.csv").write_text('user,what,none\n7,x,\n," ",\n\n9,,\n7,y,\n')
    expected = [[7, *make_keys(1, [0])], [9, 7, *make_keys(1, [1])]]
    assert keys_of(tmp_path / "a.csv", 2, columns=["all"]) == expected
    lines = ['{"user": 7, "what": "x"}', '{"what": null}', '{"user": 9}', '{"user": 7, "what": "y"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert keys_of(tmp_path / "a.jsonl", 2, columns=["user", "what"]) == expected
    with pytest.raises(InputError, match="no line has an id in none"):
        keys_of(tmp_path / "a.csv", columns=["none"])


def write_meta(path, compress=False):
    lengths = torch.tensor([[2, 0, 1], [1, 1, 1]])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    torch.save((torch.tensor([10, 11, 12, 20, 21, 22]), offsets, lengths), path)
    if compress:
        path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize("name", ["a.pt", "a.pt.gz"])
def test_meta_tuples_are_cut_by_examples(tmp_path, name):
    write_meta(tmp_path / name, compress=name.endswith("gz"))
    second = [make_keys(1, [20, 21, 22])[i] for i in range(3)]
    assert keys_of(tmp_path / name, 2) == [[10, 11, second[0], second[1]], [12, second[2]]]


def test_criteo_logs_are_datasets_in_disguise(tmp_path):
    line = "\t".join(["1", *["2"] * 13, *[f"{i:08x}" for i in range(26)]])
    (tmp_path / "a.tsv").write_text("\n".join([line] * 40) + "\n")
    trace = open_trace(tmp_path / "a.tsv", batch_size=8)
    assert len(trace.tables) == 26
    assert next(trace.key_batches()).size == 8 * 26


def test_datasets_have_traces():
    trace = open_trace("synthetic:zipf:1.0", batch_size=64, batches=3, tables=2, rows=500, seed=4)
    batches = list(trace.key_batches())
    assert [batch.size for batch in batches] == [128] * 3
    assert trace.num_embeddings == (500, 500)
    assert {int(key) >> 48 for key in batches[0]} == {0, 1}


@pytest.mark.parametrize("divider", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_of_other_programs(tmp_path, divider, encoding):
    """Spreadsheets divide columns by semicolons and begin files with a mark of their order of bytes."""
    lines = ["user,item", "5,3", "9,4", '"7",4']
    text = "\n".join(lines).replace(",", divider)
    (tmp_path / "a.csv").write_text(text, encoding=encoding)
    expected = [5, 9, 7, *make_keys(1, [3, 4, 4]).tolist()]
    assert keys_of(tmp_path / "a.csv", columns=["user", "item"]) == [expected]


if importlib.util.find_spec("pyarrow"):

    def test_parquet_columns(tmp_path):
        import pyarrow
        import pyarrow.parquet

        columns = {"a": [1, 2, 3], "b": ["x", "y", "x"], "c": [[1, 2], [], [3]], "d": [0.5, 1, 2]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        b, c = make_keys(1, [0, 1, 0]).tolist(), make_keys(2, [1, 2, 3]).tolist()
        expected = [[1, 2, *b[:2], *c[:2]], [3, b[2], c[2]]]
        assert keys_of(tmp_path / "a.parquet", 2, columns=["a", "b", "c"]) == expected
        with pytest.raises(InputError, match="column d is double"):
            keys_of(tmp_path / "a.parquet", columns=["all"])

    def test_nulls_of_parquet_are_no_ids(tmp_path):
        import pyarrow
        import pyarrow.parquet

        columns = {"a": [1, None, 2], "b": [[3, None], None, []], "c": ["x", None, "y"], "d": [1.0, 2.0, 3.0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        b, c = make_keys(1, [3]).tolist(), make_keys(2, [0, 1]).tolist()
        assert keys_of(tmp_path / "a.parquet", columns=["a", "b", "c"]) == [[1, 2, *b, *c]]
        with pytest.raises(InputError, match="lists of them: cast it to int64"):
            keys_of(tmp_path / "a.parquet", columns=["d"])

    def test_categories_and_lists_of_one_length_in_parquet(tmp_path):
        """pandas writes a column of categories as a dictionary."""
        import pyarrow
        import pyarrow.parquet

        words = pyarrow.array(["x", None, "y", "x"]).dictionary_encode()
        pairs = pyarrow.array([[1, 2], None, [3, 4], [5, None]], pyarrow.list_(pyarrow.int64(), 2))
        table = pyarrow.table({"a": words, "b": pairs})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
        b = make_keys(1, [1, 2, 3, 4, 5]).tolist()
        expected = [[0, 1, *b[:4]], [0, b[4]]]
        assert keys_of(tmp_path / "a.parquet", columns=["all"]) == expected

    @pytest.mark.parametrize("columns", [["a"], ["all"], None])
    def test_a_name_of_two_columns_in_parquet(tmp_path, columns):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table([pyarrow.array([1, 2]), pyarrow.array([3, 4])], names=["a", "a"])
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(InputError, match="the header names a column twice: a, a"):
            open_trace(tmp_path / "a.parquet", columns=columns)

else:

    def test_parquet_says_what_it_needs(tmp_path):
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match="pip install pyarrow"):
            open_trace(tmp_path / "a.parquet")


def test_wide_ids_of_foreign_traces_are_hashed(tmp_path):
    requests = np.zeros(4, ORACLE_GENERAL)
    requests["id"] = [2**64 - 1, 2**63, 2**64 - 1, 7]
    requests.tofile(tmp_path / "a.oracleGeneral")
    ((one, two, three, four),) = keys_of(tmp_path / "a.oracleGeneral", 4)
    assert one == three != two
    assert four == 7
    assert max(one, two) < 2**48


BAD_FILES = {
    "empty.npy": (b"", "is empty"),
    "empty.txt": (b"", "is empty"),
    "cut.npy": (b"\x93NUMPY\x01\x00", "no complete .npy"),
    "cut.npz": (b"PK\x03\x04", "no complete .npz"),
    "cut.oracleGeneral": (b"x" * 25, "truncated"),
    "cut.pt": (b"PK\x03\x04", "indices, offsets, lengths"),
    "cut.txt.gz": (gzip.compress(b"1\n2\n")[:-9], "no id"),
    "words.txt": (b"1\nx\n", "no id"),
    "wide.txt": (b"1\n18446744073709551616\n", "no id from 0 to 2^64 - 1"),
    "wide.csv": (b"a\n18446744073709551616\n", "a has 18446744073709551616; ids are from 0 to 2^64 - 1"),
    "signs.csv": (b"a\n18446744073709551615\n-1\n", "a has -1; ids are from 0 to 2^64 - 1"),
    "two.txt": (b"1 2\n3 4\n", "one id per line"),
    "ragged.csv": (b"a,b\n1,2\n3\n", "line 3: 1 values"),
    "bare.csv": (b"a,b\n", "is empty"),
    "what.xyz": (b"1", "unknown kind of file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises((InputError, ConfigError), match=re.escape(message)):
        keys_of(tmp_path / name)


def _record(path):
    with TraceRecorder(path, {"a": 10}, compress=True) as recorder:
        recorder.record({"a": np.arange(9)})


def _write_parquet(path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": list(range(9))}), path)


WHOLE_FILES = {
    "one.npy": lambda path: np.save(path, np.arange(9)),
    "columns.npz": lambda path: np.savez_compressed(path, a=np.arange(9), b=np.arange(9)),
    "stored.npz": lambda path: np.savez(path, a=np.arange(9)),
    "multi_hot.npz": lambda path: np.savez_compressed(path, a=np.ones((9, 2), int), b=np.ones((9, 2), int)),
    "recorded.npz": _record,
    "one.parquet": _write_parquet,
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_whatever_is_damaged_is_one_error(tmp_path, name):
    """zipfile, zlib, NumPy and Arrow raise many kinds of errors, each at bytes of its own."""
    path = tmp_path / name
    WHOLE_FILES[name](path)
    whole, refused = path.read_bytes(), 0
    flipped = [bytes([*whole[:i], whole[i] ^ 1 << i % 8, *whole[i + 1 :]]) for i in range(len(whole))]
    for damaged in [*flipped, *(whole[:i] for i in range(0, len(whole), 7))]:
        path.write_bytes(damaged)
        try:
            keys_of(path)
        except InputError:
            refused += 1
        except MemoryError:  # a shape of 10^14 ids
            pass
    assert refused > len(whole) // 20


def test_an_integer_too_long_for_python(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"a": 1}\n{"a": ' + "1" * 5000 + "}\n")
    with pytest.raises(InputError, match="line 2 is no JSON"):
        keys_of(tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.arange(3), "b": np.arange(4)}, "equally long"),
        ({"a": np.arange(3.0)}, "must be integers"),
        ({"a": np.array([-1])}, "id -1 of table 'a'; ids must not be negative"),
        ({"a": np.empty(0, np.int64)}, "is empty"),
        ({}, "holds no columns"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        keys_of(tmp_path / "a.npz")


_META = {"indices": torch.arange(3), "offsets": torch.tensor([0, 2, 3]), "lengths": torch.tensor([[2, 1]])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.arange(3), "lengths": torch.ones(2, 2)}, "do not fit together"),
        ({"indices": torch.arange(4)}, "do not fit together"),
        ({"offsets": torch.tensor([0, 7, 3])}, "do not fit together"),
        ({"offsets": torch.tensor([1, 2, 3])}, "do not fit together"),
        ({"lengths": torch.tensor([[1, 2]])}, "do not fit together"),
        ({"indices": torch.zeros(3, 2, dtype=torch.int64)}, "do not fit together"),
        ({"indices": torch.tensor(0), "offsets": torch.tensor(1), "lengths": torch.tensor(2)}, "not fit"),
        ({"indices": torch.arange(3.0)}, "indices are float32, offsets int64; make both integers"),
        ({"offsets": torch.tensor([0.0, 2, 3])}, "indices are int64, offsets float32"),
        ({"indices": torch.arange(3).bfloat16()}, "holds no .indices, offsets, lengths.: .*BFloat16"),
        ({"indices": torch.zeros(3, requires_grad=True)}, "holds no .indices, offsets, lengths.: .*grad"),
        ({"indices": "abc"}, "make both integers"),
        ({"lengths": [[2], [1, 0]]}, "holds no .indices, offsets, lengths.: "),
    ],
)
def test_meta_tuples_that_do_not_fit_are_refused(tmp_path, change, message):
    torch.save(tuple(_META.values()), tmp_path / "a.pt")
    assert keys_of(tmp_path / "a.pt") == [[0, 1, 2]]
    torch.save(tuple((_META | change).values()), tmp_path / "a.pt")
    with pytest.raises(InputError, match=message):
        keys_of(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere.npy", {}, "no file or dataset"),
        ("synthetic:zipf:1", {}, "is endless"),
        ("synthetic:zipf:1", {"batches": 0}, "at least 1"),
        ("flights", {"batch_size": 0}, "batch size"),
        ("synthetic:zipf:1", {"batches": 1, "columns": ["t0"]}, "is a dataset, which knows its tables"),
    ],
)
def test_bad_requests(source, options, message):
    with pytest.raises((InputError, ConfigError), match=message):
        open_trace(source, **options)


def test_columns_must_exist(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no column 'c'"):
        open_trace(tmp_path / "a.csv", columns=["c"])
    np.save(tmp_path / "a.npy", IDS)
    with pytest.raises(ConfigError, match=r"in .csv, .parquet, .jsonl, .ndjson, .npz files"):
        open_trace(tmp_path / "a.npy", columns=["c"])
