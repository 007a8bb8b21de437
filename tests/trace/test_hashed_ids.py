"""Ids that are unsigned 64-bit hashes: every kind of file has the same rows for the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tierstore.cli.main import main
from tierstore.trace import TraceRecorder, open_trace
from tierstore.trace.files import ORACLE_GENERAL

HASHES = np.array([18446744073709551557, 7, 2**63, 18446744073709551557, 2**48, 2**48 - 1], np.uint64)
TEXTS = list(map(str, HASHES.tolist()))


def as_parquet(path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"user": HASHES}), path)


def as_requests(path: Path) -> None:
    requests = np.zeros(HASHES.size, ORACLE_GENERAL)
    requests["id"] = HASHES
    requests.tofile(path)


def as_recorded(path: Path) -> None:
    with TraceRecorder(path, {"user": 0}) as recorder:
        recorder.record({"user": HASHES})


WRITE: dict[str, Callable[[Path], object]] = {
    "a.csv": lambda path: path.write_text("\n".join(["user", *TEXTS])),
    "a.jsonl": lambda path: path.write_text("\n".join(f'{{"user": {text}}}' for text in TEXTS)),
    "lists.jsonl": lambda path: path.write_text(json.dumps({"user": HASHES.tolist()})),
    "a.txt": lambda path: path.write_text("\n".join(TEXTS)),
    "a.npy": lambda path: np.save(path, HASHES),
    "a.npz": lambda path: np.savez(path, user=HASHES),
    "multi_hot.npz": lambda path: np.savez(path, user=HASHES.reshape(-1, 2), film=np.arange(3)),
    "a.parquet": as_parquet,
    "a.oracleGeneral": as_requests,
    "recorded.npz": as_recorded,
}


def rows_of(path: Path, **options: list[str]) -> list[int]:
    """Return the rows of the first table."""
    batches = open_trace(path, batch_size=64, **options).id_batches()
    return [row for batch in batches for row in batch[0].tolist()]


@pytest.mark.parametrize("name", WRITE)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITE[name](tmp_path / name)
    rows = rows_of(tmp_path / name)
    assert rows == [48602055970431, 7, 157745694158641, 48602055970431, rows[4], 2**48 - 1]
    assert len(set(rows)) == len(set(TEXTS))


def test_the_commands_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["user,film,label", *(f"{text},{number},0" for number, text in enumerate(TEXTS))]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    source = [str(tmp_path / "log.csv"), "--columns", "user,film"]
    assert main(["bench", "hit-rate", *source, "--batch-size", "2"]) == 0
    assert main(["trace", "record", *source, "--out", str(tmp_path / "t.npz")]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert rows_of(tmp_path / "t.npz") == rows_of(tmp_path / "log.csv", columns=["user"])


def test_a_sample_has_whole_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    hashes = rng.integers(2**63, 2**64, 20_000, np.uint64)
    with TraceRecorder(tmp_path / "t.npz", {"user": 0}, rate=0.25) as recorder:
        recorder.record({"user": np.concatenate([hashes, hashes])})
    rows = rows_of(tmp_path / "t.npz")
    assert 0.2 < len(rows) / (2 * hashes.size) < 0.3
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]


def test_words_of_which_some_look_like_wide_numbers(tmp_path: Path) -> None:
    """Hexadecimal hashes are such words."""
    (tmp_path / "a.csv").write_text("user\n123456789012345678901234\n12345678901234567890123a\n")
    assert rows_of(tmp_path / "a.csv") == [0, 1]
