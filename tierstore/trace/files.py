"""Traces in files of other programs: arrays, text, tables, libCacheSim's binary, Meta's dlrm_datasets."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import ConfigError, InputError
from tierstore.trace.columns import SAMPLE, chosen, chosen_arrays
from tierstore.trace.damage import named_damage
from tierstore.trace.json_lines import open_json_lines
from tierstore.trace.multi_hot import is_multi_hot, open_multi_hot
from tierstore.trace.trace import TableIds, Trace, in_bags, in_batches

# libCacheSim's oracleGeneral: time, id, size, and the position of the next request of the id.
ORACLE_GENERAL = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def open_npy(path: Path, batch_size: int) -> Trace:
    """Open integers through a memory map: (n,) is one table, (n, tables) has a column per table."""
    with named_damage(path, " is no complete .npy file"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    return _from_columns(path, {path.stem: array} if array.ndim == 1 else _columns(path, array), batch_size)


def open_npz(path: Path, batch_size: int, columns: Sequence[str] | None = None) -> Trace:
    """Open arrays of integers (n,) of one length, one per table; their names are the tables'. Several arrays
    (n, k) have k ids per example, as MLPerf's multi-hot data. ``columns``: the arrays that are tables."""
    if is_multi_hot(path):
        return open_multi_hot(path, batch_size, columns)
    with named_damage(path, " is no complete .npz file"), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if len(arrays) == 1 and next(iter(arrays.values())).ndim == 2:
        arrays = _columns(path, next(iter(arrays.values())))
    elif arrays:
        samples = {name: array.reshape(-1)[:SAMPLE].tolist() for name, array in arrays.items()}
        arrays = {name: arrays[name] for name in chosen_arrays(path, columns, samples)}
    return _from_columns(path, arrays, batch_size)


def open_oracle_general(path: Path, batch_size: int) -> Trace:
    """Open a file of uncompressed requests of 24 bytes each; ids of 2^48 and more are hashed."""
    size = path.stat().st_size
    if size % ORACLE_GENERAL.itemsize:
        raise InputError(
            f"{path}: {size} bytes are no whole number of requests of {ORACLE_GENERAL.itemsize}; is it "
            "truncated, or compressed (.zst: unpack it first)?"
        )
    if not size:
        raise InputError(f"{path} is empty")
    requests = np.memmap(path, ORACLE_GENERAL, mode="r")
    return _trace(path, ("objects",), [requests["id"]], batch_size)


def open_jsonl(path: Path, batch_size: int, columns: Sequence[str] | None) -> Trace:
    """Open a log of one JSON object per line; each of ``columns`` is a table."""
    with _text(path) as lines:
        return open_json_lines(path, lines, batch_size, columns)


def open_text(path: Path, batch_size: int) -> Trace:
    """Open a text of one decimal id per line; plain or .gz."""
    with _text(path) as lines:
        ids = _parse_numbers(path, lines)
    return _from_columns(path, {path.name.split(".")[0]: ids}, batch_size)


def open_csv(path: Path, batch_size: int, columns: Sequence[str] | None) -> Trace:
    """Open a file of a header and one example per line; each of ``columns`` is a table.

    A column of integers has ids. The values of another column are numbered by first use. An example whose
    value is empty has no id there. Where the header has no comma, columns may be divided by semicolons, tabs
    or bars.
    """
    with _text(path) as lines:
        top = lines.readline()
        divider = next((mark for mark in ",;\t|" if mark in top), ",")
        reader = csv.reader(chain([top] if top else [], lines), delimiter=divider)
        header = next(reader, None)
        if not header:
            raise InputError(f"{path} is empty; it needs a header and rows")
        _check_header(path, header)
        rows = _rows(path, reader, len(header))
        first = list(islice(rows, SAMPLE))
        if not first:
            raise InputError(f"{path} is empty: there is no line under the header")
        names = chosen(path, columns, {name: [row[i] for row in first] for i, name in enumerate(header)})
        values: list[list[str]] = [[] for _ in names]
        positions = [header.index(name) for name in names]
        for row in chain(first, rows):
            for column, position in zip(values, positions, strict=True):
                column.append(row[position])
    found = [_bags(path, name, column) for name, column in zip(names, values, strict=True)]
    if not any(len(ids) for ids, _ in found):
        raise InputError(f"{path}: no line has an id in {', '.join(names)}")
    return Trace(str(path), tuple(names), in_bags(found, batch_size), -(-len(values[0]) // batch_size))


def _check_names(path: Path, header: list[str]) -> None:
    if len(set(header)) < len(header):
        raise InputError(f"{path}: the header names a column twice: {', '.join(header)}")


def _check_header(path: Path, header: list[str]) -> None:
    _check_names(path, header)
    if all(name.strip().lstrip("-").replace(".", "", 1).isdigit() for name in header):
        raise InputError(
            f"{path} has no header: its first line is {','.join(header)[:60]}; put a line with the names of "
            "the columns in front"
        )


def _rows(path: Path, reader: Any, width: int) -> Iterator[list[str]]:
    for row in reader:
        if not row:  # a blank line is no example
            continue
        if len(row) != width:
            raise InputError(f"{path}, line {reader.line_num}: {len(row)} values, but the header has {width}")
        yield row


def open_parquet(path: Path, batch_size: int, columns: Sequence[str] | None) -> Trace:
    """Open columns of integers, strings or lists of them (multi-hot), one per table. Needs pyarrow.

    An example whose value is null has no id there.
    """
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: reading parquet needs the package pyarrow (pip install pyarrow)"
        ) from error
    damaged = partial(named_damage, path, " is no complete parquet file")
    with damaged():
        file = parquet.ParquetFile(path)
        _check_names(path, file.schema_arrow.names)
        samples = _parquet_samples(file)
    names = chosen(path, columns, samples)
    known: list[dict[Any, int]] = [{} for _ in names]

    def batches() -> Iterator[list[TableIds]]:
        parts = _whole_batches(file.iter_batches(batch_size, columns=list(names)), batch_size)
        while True:
            with damaged():
                part = next(parts, None)
            if part is None:
                return
            values = [column.combine_chunks() for column in part.columns]
            yield [(t, _arrow_ids(path, names[t], values[t], known[t])) for t in range(len(names))]

    return Trace(str(path), tuple(names), batches, -(-file.metadata.num_rows // batch_size))


def open_meta(path: Path, batch_size: int) -> Trace:
    """Open Meta's dlrm_datasets: (indices, offsets, lengths) of one large batch, in .pt or .pt.gz.

    Lengths are (tables, examples). The file is loaded with ``weights_only``, so it cannot run code.
    """
    import torch

    with named_damage(path, " holds no (indices, offsets, lengths)"), _binary(path) as file:
        parts = torch.load(file, map_location="cpu", weights_only=True)
        indices, offsets, lengths = map(np.asarray, parts)
    if indices.dtype.kind not in "iu" or offsets.dtype.kind not in "iu":
        raise InputError(f"{path}: indices are {indices.dtype}, offsets {offsets.dtype}; make both integers")
    if (
        (indices.ndim, offsets.ndim, lengths.ndim) != (1, 1, 2)
        or offsets.size != lengths.size + 1
        or (offsets[0], offsets[-1]) != (0, indices.size)
        or not np.array_equal(np.diff(offsets), lengths.reshape(-1))
    ):
        raise InputError(
            f"{path}: lengths {lengths.shape}, offsets {offsets.shape}, indices {indices.shape} do not "
            "fit together; lengths are (tables, examples), and offsets their sums from 0 on"
        )
    tables, examples = lengths.shape

    def batches() -> Iterator[list[TableIds]]:
        for first in range(0, examples, batch_size):
            end = min(first + batch_size, examples)
            yield [
                (t, indices[offsets[t * examples + first] : offsets[t * examples + end]])
                for t in range(tables)
            ]

    return Trace(str(path), tuple(f"t{t}" for t in range(tables)), batches, -(-examples // batch_size))


def _columns(path: Path, array: np.ndarray) -> dict[str, np.ndarray]:
    if array.ndim != 2:
        raise InputError(f"{path}: ids must be (n,) or (n, tables), not {array.shape}")
    return {f"t{t}": array[:, t] for t in range(array.shape[1])}


def _from_columns(path: Path, arrays: dict[str, np.ndarray], batch_size: int) -> Trace:
    if not arrays:
        raise InputError(f"{path} holds no columns; save an array of ids for each table in it")
    lengths = {name: array.shape for name, array in arrays.items()}
    if any(array.ndim != 1 for array in arrays.values()) or len(set(lengths.values())) > 1:
        raise InputError(f"{path}: the columns of a trace must be 1-d and equally long; shapes are {lengths}")
    for name, array in arrays.items():
        if array.dtype.kind not in "iu":
            raise InputError(f"{path}: column {name} is {array.dtype}; ids must be integers")
    return _trace(path, tuple(arrays), list(arrays.values()), batch_size)


def _trace(path: Path, tables: tuple[str, ...], columns: list[np.ndarray], batch_size: int) -> Trace:
    if not len(columns[0]):
        raise InputError(f"{path} is empty: a trace needs at least one id")
    return Trace(str(path), tables, in_batches(columns, batch_size), -(-len(columns[0]) // batch_size))


@contextmanager
def _text(path: Path) -> Iterator[Any]:
    """Open a text, plain or .gz. Raises InputError if the block finds that it is none."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", newline="", encoding="utf-8-sig") as lines:
            yield lines
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, csv.Error) as error:
        raise InputError(f"{path} is no text: {error}") from error


def _binary(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parse_numbers(path: Path, lines: Any) -> np.ndarray:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the file is empty, which the caller reports
            ids = np.loadtxt(lines, dtype=np.uint64, ndmin=1, comments=None)
    except (ValueError, OverflowError, EOFError, OSError) as error:
        raise InputError(f"{path}: a line is no id from 0 to 2^64 - 1: {error}") from error
    if ids.ndim != 1:
        raise InputError(f"{path}: one id per line, not {ids.shape[1]} (a file with columns must be a .csv)")
    return ids


def _parquet_samples(file: Any) -> dict[str, list[object]]:
    """Return the first values of every column; of a column without values its type."""
    first = next(file.iter_batches(SAMPLE), None)
    return {
        field.name: [field.type] if first is None else first.column(i).to_pylist()
        for i, field in enumerate(file.schema_arrow)
    }


def _whole_batches(parts: Iterator[Any], size: int) -> Iterator[Any]:
    """Yield batches of ``size`` rows, and the rest. Arrow ends a batch of categories with its row group."""
    import pyarrow

    waiting = []
    for part in parts:
        waiting.append(_without_categories(part))
        if sum(one.num_rows for one in waiting) >= size:
            table = pyarrow.Table.from_batches(waiting)
            yield table.slice(0, size).combine_chunks()
            waiting = table.slice(size).to_batches()
    if waiting:
        yield pyarrow.Table.from_batches(waiting).combine_chunks()


def _without_categories(part: Any) -> Any:
    """Return a batch with the values of columns of categories, which pandas writes as dictionaries."""
    import pyarrow

    columns = [
        column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
        for column in part.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, part.schema.names)


def _bags(path: Path, name: str, values: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a column, and where those of each example begin: an empty value is no id."""
    there = np.fromiter(map(bool, map(str.strip, values)), bool, len(values))
    given = values if there.all() else list(compress(values, there))
    return _ids(path, name, given), np.concatenate([[0], np.cumsum(there)])


def _ids(path: Path, name: str, values: list[str]) -> np.ndarray:
    for kind in (np.int64, np.uint64):  # hashes are often unsigned
        try:
            return np.array(values, kind)
        except OverflowError:
            continue  # other values may still be words
        except ValueError:
            break
    else:
        _check_range(path, name, values)
    first: dict[str, int] = {}
    return np.array([first.setdefault(value, len(first)) for value in values], np.int64)


def _check_range(path: Path, name: str, values: list[str]) -> None:
    """Raise InputError if all values are integers, of which some are no ids. Hexadecimal hashes are words,
    though some of them have no letter."""
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return
    wrong = next(number for number in numbers if not 0 <= number < 1 << 64)
    raise InputError(f"{path}: column {name} has {wrong}; ids are from 0 to 2^64 - 1")


def _arrow_ids(path: Path, name: str, column: Any, known: dict[Any, int]) -> np.ndarray:
    import pyarrow

    column, kind = column.drop_null(), column.type
    types = pyarrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _arrow_ids(path, name, column.flatten(), known)
    if types.is_integer(kind):
        return column.to_numpy()
    if types.is_string(kind) or types.is_large_string(kind):
        return np.array([known.setdefault(value, len(known)) for value in column.to_pylist()], np.int64)
    raise InputError(
        f"{path}: column {name} is {kind}; ids must be integers, strings or lists of them: cast it to int64"
    )
