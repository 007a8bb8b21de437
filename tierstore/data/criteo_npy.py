"""Criteo's click logs in the layout of MLPerf: day_N_dense.npy, day_N_sparse.npy, day_N_labels.npy.

dense is float32 (n, 13), logarithms already; sparse int32 (n, 26); labels int32 (n, 1) or (n,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierstore.data.dataset import Batch, TableInfo, batch_ranges, check_batching, one_id_per_table
from tierstore.errors import InputError


@dataclass(frozen=True)
class NpyRows:
    """Rows of a .npy file, read as they are asked for: a memory map would count as memory of the process."""

    file: Path
    rows: int
    columns: int
    dtype: np.dtype
    start: int

    @staticmethod
    def open(file: Path, columns: int) -> NpyRows:
        try:
            with open(file, "rb") as raw:
                version = np.lib.format.read_magic(raw)
                read_header = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                    version, np.lib.format.read_array_header_2_0
                )
                shape, by_columns, dtype = read_header(raw)
                start = raw.tell()
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read as an array: {error}") from error
        shape = (*shape, 1) if len(shape) == 1 else shape
        if len(shape) != 2 or shape[1] != columns or by_columns or dtype.hasobject:
            raise InputError(f"{file} holds {dtype} {shape}; expected numbers (n, {columns}), row by row")
        if file.stat().st_size < start + shape[0] * columns * dtype.itemsize:
            raise InputError(f"{file} is cut short: it does not hold its {shape[0]} rows")
        return NpyRows(file, shape[0], columns, dtype, start)

    def read(self, first: int, end: int) -> np.ndarray:
        """Return rows first .. end - 1, (end - first, columns)."""
        offset = self.start + first * self.columns * self.dtype.itemsize
        count = (end - first) * self.columns
        return np.fromfile(self.file, self.dtype, count, offset=offset).reshape(-1, self.columns)


@dataclass(frozen=True)
class Day:
    """The three files of a day, which have the same number of rows."""

    dense: NpyRows
    sparse: NpyRows
    labels: NpyRows

    @staticmethod
    def open(sparse: Path, tables: int, dense_dim: int) -> Day:
        def sibling(part: str, columns: int) -> NpyRows:
            return NpyRows.open(sparse.with_name(sparse.name.replace("_sparse", f"_{part}")), columns)

        day = Day(sibling("dense", dense_dim), NpyRows.open(sparse, tables), sibling("labels", 1))
        if len({day.dense.rows, day.sparse.rows, day.labels.rows}) != 1:
            raise InputError(
                f"{sparse} has {day.sparse.rows} rows, its dense file {day.dense.rows}, "
                f"its labels {day.labels.rows}"
            )
        return day


@dataclass(frozen=True)
class Part:
    """Rows first .. end - 1 of a day."""

    day: Day
    first: int
    end: int


@dataclass(frozen=True)
class CriteoNpy:
    """The days in order. The last day tests; of a single day, the last tenth."""

    tables: tuple[TableInfo, ...]
    days: tuple[Day, ...]
    hashed: bool

    name = "criteo"
    dense_dim = 13

    @property
    def _train_parts(self) -> list[Part]:
        if len(self.days) == 1:
            return [Part(self.days[0], 0, self.days[0].sparse.rows * 9 // 10)]
        return [Part(day, 0, day.sparse.rows) for day in self.days[:-1]]

    @property
    def _test_part(self) -> Part:
        last = self.days[-1]
        return Part(last, last.sparse.rows * 9 // 10 if len(self.days) == 1 else 0, last.sparse.rows)

    @property
    def num_train(self) -> int:
        return sum(part.end - part.first for part in self._train_parts)

    @property
    def num_test(self) -> int:
        return self._test_part.end - self._test_part.first

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        check_batching(batch_size, epochs, start_batch)
        ranges = batch_ranges(self.num_train, batch_size, epochs, start_batch)
        return (self._batch(self._train_parts, first, end) for first, end in ranges)

    def test(self, batch_size: int) -> Iterator[Batch]:
        check_batching(batch_size)
        ranges = batch_ranges(self.num_test, batch_size)
        return (self._batch([self._test_part], first, end) for first, end in ranges)

    def _batch(self, parts: list[Part], first: int, end: int) -> Batch:
        """Return examples first .. end - 1 of the parts, which follow one another."""
        dense, sparse, labels = [], [], []
        for part in parts:
            a, b = max(part.first + first, part.first), min(part.first + end, part.end)
            if a < b:
                dense.append(part.day.dense.read(a, b))
                sparse.append(self._ids(part.day.sparse, a, b))
                labels.append(part.day.labels.read(a, b)[:, 0])
            first, end = first - (part.end - part.first), end - (part.end - part.first)
        return one_id_per_table(
            self.tables, np.concatenate(dense), np.concatenate(sparse, axis=1), np.concatenate(labels)
        )

    def _ids(self, rows: NpyRows, first: int, end: int) -> np.ndarray:
        ids = rows.read(first, end).astype(np.int64).T
        if self.hashed:
            return ids % np.array([[table.num_embeddings] for table in self.tables])
        if ids.min() < 0:
            row, column = np.argwhere(ids.T < 0)[0]
            raise InputError(
                f"{rows.file}, row {first + row}: id {ids[column, row]} of cat_{column} is negative"
            )
        return ids
