from __future__ import annotations

import gzip
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore.data import load
from tierstore.errors import ConfigError, InputError


def line(k: int) -> str:
    """The k-th example; some fields are missing, some counts negative."""
    counts = ["" if (k + j) % 7 == 0 else str((k * 31 + j) % 500 - 3) for j in range(13)]
    ids = ["" if (k + j) % 11 == 0 else f"{(k * 2654435761 + j * 40503) % 2**32:08x}" for j in range(26)]
    return "\t".join([str(k % 3 // 2), *counts, *ids])


def write(file: Path, first: int, end: int, ending: str = "\n", last: str = "\n") -> Path:
    text = (ending.join(line(k) for k in range(first, end)) + last).encode()
    file.write_bytes(
        gzip.compress(text[:1000]) + gzip.compress(text[1000:]) if file.suffix == ".gz" else text
    )
    return file


def joined(batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batches = list(batches)
    ids = torch.cat([batch.sparse.values().view(26, -1) for batch in batches], dim=1)
    return torch.cat([b.labels for b in batches]), torch.cat([b.dense for b in batches]), ids


def check_examples(batches, numbers: range) -> None:
    """That these are the examples of ``line``, with raw ids."""
    labels, dense, ids = joined(batches)
    assert len(labels) == len(numbers)
    for row, k in enumerate(numbers):
        fields = line(k).split("\t")
        assert labels[row] == int(fields[0])
        counts = [math.log1p(max(int(field), 0)) if field else 0.0 for field in fields[1:14]]
        assert dense[row].tolist() == pytest.approx(counts, rel=1e-6)
        assert ids[:, row].tolist() == [int(field, 16) if field else 2**32 for field in fields[14:]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_days_in_order(tmp_path, suffix):
    write(tmp_path / f"day_2{suffix}", 50, 70, last="")
    write(tmp_path / f"day_10{suffix}", 70, 90, ending="\r\n", last="\r\n")
    write(tmp_path / f"day_11{suffix}", 90, 120)
    data = load("criteo", path=str(tmp_path), hashed=False)
    assert {table.num_embeddings for table in data.tables} == {2**32 + 1}
    assert [len(batch) for batch in data.train(16)] == [16, 16, 8]
    check_examples(data.train(16), range(50, 90))
    check_examples(data.test(1000), range(90, 120))


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_one_file_is_cut_in_two(tmp_path, name):
    file = write(tmp_path / name, 0, 1500, last="")
    data = load("criteo", path=str(file), hashed=False)
    count = sum(len(batch) for batch in data.train(100))
    assert 1250 < count < 1400
    check_examples(data.train(100), range(count))
    check_examples(data.test(100), range(count, 1500))


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_resuming(tmp_path, name):
    data = load("criteo", path=str(write(tmp_path / name, 0, 300)))
    whole = list(data.train(32, epochs=3))
    for start in (1, 5, len(whole) // 3, len(whole) // 3 + 2, len(whole)):
        rest = list(data.train(32, epochs=3, start_batch=start))
        assert [len(batch) for batch in rest] == [len(batch) for batch in whole[start:]]
        if rest:
            for a, b in zip(joined(rest), joined(whole[start:]), strict=True):
                assert torch.equal(a, b)


def test_hashing_spreads_each_feature_on_its_own(tmp_path):
    file = write(tmp_path / "train.txt", 0, 2000)
    raw = joined(load("criteo", path=str(file), hashed=False).train(500))[2]
    ids = joined(load("criteo", path=str(file), max_rows=1000).train(500))[2]
    assert 0 <= ids.min() <= ids.max() < 1000
    # equal ids stay equal, within a feature; the same id hashes differently in another one
    for feature in (0, 13):
        seen: dict[int, int] = {}
        for a, b in zip(raw[feature].tolist(), ids[feature].tolist(), strict=True):
            assert seen.setdefault(a, b) == b
    missing = [ids[f][raw[f] == 2**32][0].item() for f in range(26)]
    assert len(set(missing)) > 20


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (7, lambda f: ["2", *f[1:]], "field 1 is not a label 0 or 1"),
        (7, lambda f: ["", *f[1:]], "field 1 is not a label"),
        (1, lambda f: [*f[:3], "4x", *f[4:]], "field 4 is not an integer"),
        (2, lambda f: [*f[:3], "-", *f[4:]], "field 4 is not an integer"),
        (3, lambda f: [*f[:20], "xyz", *f[21:]], "field 21 is not an id"),
        (3, lambda f: [*f[:20], "123456789", *f[21:]], "field 21 is not an id"),
        (9, lambda f: f[:-1], "field 40 is not an id of up to 8 hex digits or is missing"),
        (9, lambda f: [*f, "0"], "more than 40 fields"),
        (5, lambda f: [], "field 1 is not a label"),
    ],
)
def test_malformed_lines_are_named(tmp_path, number, change, message):
    lines = [line(k).split("\t") for k in range(30)]
    lines[number - 1] = change(lines[number - 1])
    (tmp_path / "day_0").write_text(line(0) + "\n")
    (tmp_path / "day_1").write_text("".join("\t".join(fields) + "\n" for fields in lines))
    (tmp_path / "day_2").write_text(line(0) + "\n")
    data = load("criteo", path=str(tmp_path))
    with pytest.raises(InputError, match=rf"day_1, line {number}: {message}"):
        list(data.train(4))


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_lines_of_the_test_part_are_counted_from_the_files_start(tmp_path, name):
    text = "".join(line(k) + "\n" for k in range(500)) + "1\tx\n"
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    with pytest.raises(InputError, match=rf"{name}, line 501: field 2 "):
        list(load("criteo", path=str(file)).test(64))


def test_damaged_gzip_is_named(tmp_path):
    file = write(tmp_path / "train.txt.gz", 0, 500)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    with pytest.raises(InputError, match=r"train\.txt\.gz is cut short"):
        list(load("criteo", path=str(file)).test(100))
    file.write_bytes(b"not gzip" + whole)
    with pytest.raises(InputError, match="not a gzip file"):
        list(load("criteo", path=str(file)).train(100))


def test_memory_does_not_grow_with_the_file(tmp_path):
    chunk = "".join(line(k) + "\n" for k in range(2000)).encode()

    def peak(copies: int) -> int:
        file = tmp_path / f"{copies}.txt"
        file.write_bytes(chunk * copies)
        data = load("criteo", path=str(file))
        tracemalloc.start()
        for _ in data.train(1000):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(1)  # compiles
    assert peak(40) < peak(8) + (2 << 20)  # blocks grow up to 1 MiB


def write_arrays(folder: Path, days: list[int]) -> np.ndarray:
    rng, first, all_ids = np.random.default_rng(2), 0, []
    for day, rows in enumerate(days):
        ids = rng.integers(0, 2**31, (rows, 26)).astype(np.int32)
        np.save(folder / f"day_{day}_sparse.npy", ids)
        np.save(
            folder / f"day_{day}_dense.npy",
            np.arange(first, first + rows, dtype=np.float32)[:, None].repeat(13, 1),
        )
        np.save(folder / f"day_{day}_labels.npy", (np.arange(rows) % 2).astype(np.int32)[:, None])
        first += rows
        all_ids.append(ids)
    return np.concatenate(all_ids)


def test_arrays_across_days(tmp_path):
    ids = write_arrays(tmp_path, [30, 5, 40, 20])
    data = load("criteo", path=str(tmp_path), max_rows=1000)
    assert (data.num_train, data.num_test) == (75, 20)
    labels, dense, values = joined(data.train(32))
    assert dense[:, 0].tolist() == list(range(75))
    assert labels[:4].tolist() == [0, 1, 0, 1]
    assert np.array_equal(values.numpy(), ids[:75].T % 1000)
    assert torch.equal(joined(data.train(32, epochs=2, start_batch=2))[1][:11, 0], dense[64:, 0])
    assert joined(data.test(7))[1][:, 12].tolist() == list(range(75, 95))
    raw = load("criteo", path=str(tmp_path), hashed=False)
    assert np.array_equal(joined(raw.train(50))[2].numpy(), ids[:75].T)
    assert raw.tables[0].num_embeddings == 2**31


def test_arrays_of_one_day(tmp_path):
    write_arrays(tmp_path, [50])
    data = load("criteo", path=str(tmp_path))
    assert (data.num_train, data.num_test) == (45, 5)
    assert joined(data.test(3))[1][:, 0].tolist() == list(range(45, 50))


def test_bad_arrays_are_named(tmp_path):
    ids = write_arrays(tmp_path, [10, 10])
    ids[3, 2] = -5
    np.save(tmp_path / "day_0_sparse.npy", ids[:10])
    with pytest.raises(InputError, match=r"day_0_sparse\.npy, row 3: id -5 of cat_2"):
        list(load("criteo", path=str(tmp_path), hashed=False).train(4))
    np.save(tmp_path / "day_0_labels.npy", np.zeros(9))
    with pytest.raises(InputError, match="its labels 9"):
        load("criteo", path=str(tmp_path))
    np.save(tmp_path / "day_0_labels.npy", np.zeros((10, 2)))
    with pytest.raises(InputError, match=r"day_0_labels\.npy holds float64 \(10, 2\)"):
        load("criteo", path=str(tmp_path))
    file = tmp_path / "day_0_labels.npy"
    np.save(file, np.zeros(10))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match="cut short"):
        load("criteo", path=str(tmp_path))
    file.write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as an array"):
        load("criteo", path=str(tmp_path))


def test_options(tmp_path):
    with pytest.raises(ConfigError, match="needs path"):
        load("criteo")
    with pytest.raises(ConfigError, match="has no day_N"):
        load("criteo", path=str(tmp_path))
    with pytest.raises(ConfigError, match="raw ids need all rows"):
        load("criteo", path=str(tmp_path), hashed=False, max_rows=5)
    with pytest.raises(ConfigError, match="at least 1"):
        load("criteo", path=str(tmp_path), max_rows=0)
    with pytest.raises(ConfigError, match="does not take drift; it takes path, hashed, max_rows"):
        load("criteo", drift=0.5)
