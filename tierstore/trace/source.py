"""Traces by name: files of all kinds, and the datasets of ``tierstore.data``."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tierstore import data
from tierstore.data.dataset import Dataset
from tierstore.errors import ConfigError, InputError
from tierstore.trace import files, recorded
from tierstore.trace.damage import named_damage
from tierstore.trace.trace import TableIds, Trace, check_batch_size

#: The suffixes by which ``open_trace`` tells files apart.
SUFFIXES = {
    ".npz": "recorded by tierstore, or arrays of one length, one per table; (n, k) for multi-hot ids",
    ".npy": "ids (n,) or (n, tables)",
    ".parquet": "columns",
    ".csv, .csv.gz": "columns under a header",
    ".jsonl, .ndjson, .jsonl.gz, .ndjson.gz": "an object per line",
    ".txt, .txt.gz": "an id per line",
    ".oracleGeneral, .oracleGeneral.bin": "libCacheSim's binary",
    ".pt, .pt.gz": "Meta's dlrm_datasets",
    ".tsv, .tsv.gz": "Criteo's logs",
}


_WITH_COLUMNS = (".csv", ".parquet", ".jsonl", ".ndjson", ".npz")


def open_trace(
    source: str | Path,
    *,
    batch_size: int = 4096,
    batches: int | None = None,
    columns: Sequence[str] | None = None,
    path: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Trace:
    """Open the trace in a file, whose name tells its kind, or of the training part of a dataset.

    ``batch_size`` is the number of examples (lines, requests) per batch; a recorded trace keeps its own
    batches. ``batches`` is the most batches to read. ``columns`` are the tables to read of CSV, JSON
    lines, parquet and .npz, ["all"] for every column; files with several columns need it, of arrays those
    with one that does not look like ids. ``path``, ``seed`` and
    other options go to ``tierstore.data.load``. ConfigError and InputError say what is wrong.
    """
    check_batch_size(batch_size)
    if batches is not None and batches < 1:
        raise ConfigError(f"the number of batches must be at least 1, not {batches}")
    name = str(source)
    file = Path(name)
    if file.is_file():
        if options:
            raise ConfigError(f"{name} is a file: options {', '.join(options)} are for datasets")
        trace = _open_file(file, batch_size, columns)
    elif _is_dataset(name):
        if columns is not None:
            raise ConfigError(f"{name} is a dataset, which knows its tables; leave columns out")
        trace = from_dataset(data.load(name, path=path, seed=seed, **options), batch_size)
    else:
        raise ConfigError(
            f"no file or dataset {name!r}; datasets are {', '.join(data.names())}; files are recognised by "
            + ", ".join(SUFFIXES)
        )
    if batches is not None:
        trace = first_batches(trace, batches)
    if trace.num_batches is None and _endless(name):
        raise ConfigError(f"{name} is endless; give the number of batches (--batches)")
    return trace


def from_dataset(dataset: Dataset, batch_size: int) -> Trace:
    """Make a trace of one pass over the training examples of a dataset."""

    def batches() -> Iterator[Sequence[TableIds]]:
        for batch in dataset.train(batch_size):
            ids = batch.sparse.values().numpy()
            ends = batch.sparse.offset_per_key()
            yield [(t, ids[ends[t] : ends[t + 1]]) for t in range(len(ends) - 1)]

    return Trace(
        dataset.name,
        tuple(table.name for table in dataset.tables),
        batches,
        None if dataset.num_train is None else -(-dataset.num_train // batch_size),
        tuple(table.num_embeddings for table in dataset.tables),
        training=lambda: dataset.train(batch_size),
    )


def _open_file(path: Path, batch_size: int, columns: Sequence[str] | None) -> Trace:
    name = path.name.lower().removesuffix(".gz")
    if columns is not None and not name.endswith(_WITH_COLUMNS):
        raise ConfigError(f"{path}: columns can be chosen in {', '.join(_WITH_COLUMNS)} files only")
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")
    if name.endswith(".npz"):
        if not _is_recorded(path):
            return files.open_npz(path, batch_size, columns)
        if columns is not None:
            raise ConfigError(f"{path} was recorded by tierstore, which knows its tables; leave columns out")
        return recorded.open_recorded(path)
    if name.endswith(".npy"):
        return files.open_npy(path, batch_size)
    if name.endswith(".parquet"):
        return files.open_parquet(path, batch_size, columns)
    if name.endswith(".csv"):
        return files.open_csv(path, batch_size, columns)
    if name.endswith((".jsonl", ".ndjson")):
        return files.open_jsonl(path, batch_size, columns)
    if name.endswith(".txt"):
        return files.open_text(path, batch_size)
    if name.removesuffix(".bin").endswith((".oraclegeneral", "oraclegeneral")):
        return files.open_oracle_general(path, batch_size)
    if name.endswith(".pt"):
        return files.open_meta(path, batch_size)
    if name.endswith(".tsv"):
        return from_dataset(data.load("criteo", path=str(path), hashed=False), batch_size)
    raise ConfigError(f"{path}: unknown kind of file; names of trace files end in {', '.join(SUFFIXES)}")


def _is_recorded(path: Path) -> bool:
    with named_damage(path, " is no complete .npz file"), zipfile.ZipFile(path) as archive:
        return recorded.HEADER in archive.namelist()


def _is_dataset(name: str) -> bool:
    first = name.split(":")[0]
    return any(first == known.split(":")[0] for known in data.names())


def _endless(name: str) -> bool:
    return name.startswith("synthetic:")


def first_batches(trace: Trace, limit: int) -> Trace:
    """Return the trace of at most ``limit`` batches."""
    known = limit if trace.num_batches is None else min(limit, trace.num_batches)
    training = trace.training
    return replace(
        trace,
        batches=lambda: islice(trace.batches(), limit),
        num_batches=known,
        training=None if training is None else lambda: islice(training(), limit),
    )
