"""Criteo's click logs as text: label, 13 counts and 26 hexadecimal ids per line, tab-separated, plain or
gzipped.

Read as a stream: memory does not depend on the size of the files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cache_policies.disk_cache import compiled
from tierstore.data.crossing import mix64
from tierstore.data.dataset import Batch, TableInfo, check_batching, one_id_per_table
from tierstore.errors import InputError

COUNTS, IDS = 13, 26
MISSING = 1 << 32  # as an id: above all ids of 32 bits
_BLOCK = 1 << 20
_TAB, _NEWLINE, _RETURN, _MINUS = ord("\t"), ord("\n"), ord("\r"), ord("-")


@compiled
def _parse_field(text, start, last, base, max_digits):
    """Parse the number of up to ``max_digits`` digits before the next tab or ``last``.

    Returns (value, digits, where the field ends). The digits are 0 of an empty field and -1 of a field that
    is no such number.
    """
    negative = base == 10 and start < last and text[start] == _MINUS
    start += np.int64(negative)
    value, digits = np.int64(0), np.int64(0)
    while start < last and text[start] != _TAB:
        c = np.int64(text[start])
        digit = np.int64(99)
        if 48 <= c <= 57:
            digit = c - 48
        elif 97 <= c <= 102:
            digit = c - 87
        elif 65 <= c <= 70:
            digit = c - 55
        if digit >= base or digits == max_digits:
            return value, np.int64(-1), start
        value, digits, start = value * base + digit, digits + 1, start + 1
    if negative:
        return -value, digits if digits > 0 else np.int64(-1), start
    return value, digits, start


@compiled
def _parse_line(text, start, last, counts, ids):
    """Parse one line, ``text[start:last]``; return (label, field at fault or 0)."""
    label = np.int64(0)
    for field in range(1 + COUNTS + IDS):
        if start > last:
            return label, field + 1
        is_id = field > COUNTS
        value, digits, start = _parse_field(text, start, last, 16 if is_id else 10, 8 if is_id else 18)
        if digits < 0:
            return label, field + 1
        if is_id:
            ids[field - 1 - COUNTS] = value if digits else MISSING
        elif field > 0:
            counts[field - 1] = np.float32(value) if digits else np.float32(np.nan)
        elif digits == 0 or value < 0 or value > 1:
            return label, 1
        else:
            label = value
        start += 1
    return label, 0 if start > last else 2 + COUNTS + IDS


@compiled
def parse_lines(text, at, labels, counts, ids):
    """Parse whole lines of ``text`` uint8 (n,) from ``at`` on, until the arrays are full or no line is whole.

    The arrays are labels float32 (B,), counts float32 (B, 13) and ids int64 (B, 26). A missing count is NaN,
    a missing id is MISSING. Returns (lines parsed, where the next line starts, field at fault). The field at
    fault is 1 to 40, 41 if there are more fields than that, or 0.
    """
    row, n = 0, text.shape[0]
    while row < labels.shape[0]:
        end = at
        while end < n and text[end] != _NEWLINE:
            end += 1
        if end == n:
            break
        last = end - 1 if end > at and text[end - 1] == _RETURN else end
        label, fault = _parse_line(text, at, last, counts[row], ids[row])
        if fault:
            return row, at, fault
        labels[row] = label
        at = end + 1
        row += 1
    return row, at, 0


@dataclass(frozen=True)
class TextFile:
    """The lines of a file, or of a part of it.

    late: None for the whole file, False for the lines that start in the first nine tenths of its bytes (as
    stored), True for the rest.
    """

    path: Path
    late: bool | None = None

    def pieces(self) -> Iterator[bytes]:
        """Yield the text, in pieces of any size."""
        size = self.path.stat().st_size
        block = max(1, min(_BLOCK, size // 64))
        blocks = _gunzipped(self.path, block) if self.path.suffix == ".gz" else None
        split = size * 9 // 10 // block * block
        if self.late is None:
            for _, text in blocks or _plain(self.path, block, 0):
                yield text
        elif self.late:
            yield from _after(blocks or _plain(self.path, block, max(0, split - block)), split)
        else:
            yield from _before(blocks or _plain(self.path, block, 0), split)

    def lines_before(self) -> int:
        """Count the lines of the file before the first line of this part, by reading all of them."""
        if not self.late:
            return 0
        return sum(piece.count(b"\n") for piece in replace(self, late=False).pieces())


Blocks = Iterator[tuple[int, bytes]]  # (offset in the file as stored, text)


def _before(blocks: Blocks, split: int) -> Iterator[bytes]:
    """Yield the lines that start in blocks before ``split``."""
    open_line = False
    for offset, text in blocks:
        if offset < split:
            yield text
            open_line = not text.endswith(b"\n") if text else open_line
            continue
        end = text.find(b"\n") + 1
        if open_line:
            yield text[:end] if end else text
        if end or not open_line:
            return


def _after(blocks: Blocks, split: int) -> Iterator[bytes]:
    """Yield the lines that start in blocks from ``split`` on."""
    open_line = False
    for offset, text in blocks:
        if offset >= split and not open_line:
            yield text
        elif offset >= split:
            end = text.find(b"\n") + 1
            open_line = not end
            if end:
                yield text[end:]
        elif text:
            open_line = not text.endswith(b"\n")


def _plain(path: Path, block: int, offset: int) -> Blocks:
    with open(path, "rb") as raw:
        raw.seek(offset)
        while text := raw.read(block):
            yield offset, text
            offset += len(text)


def _gunzipped(path: Path, block: int) -> Blocks:
    offset, decoder = 0, zlib.decompressobj(wbits=31)
    with open(path, "rb") as raw:
        try:
            while stored := raw.read(block):
                text = decoder.decompress(stored)
                while decoder.eof and decoder.unused_data:  # a file may be a chain of gzip files
                    rest, decoder = decoder.unused_data, zlib.decompressobj(wbits=31)
                    text += decoder.decompress(rest)
                yield offset, text
                offset += len(stored)
        except zlib.error as error:
            raise InputError(f"{path} is not a gzip file, or is damaged: {error}") from error
    if not decoder.eof:
        raise InputError(f"{path} is cut short")


@dataclass(frozen=True)
class CriteoText:
    """Files in order. The last file tests; of a single file, the last tenth of its bytes."""

    tables: tuple[TableInfo, ...]
    files: tuple[Path, ...]
    hashed: bool

    name = "criteo"
    dense_dim = COUNTS
    num_train = None
    num_test = None

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        check_batching(batch_size, epochs, start_batch)
        files = [TextFile(file) for file in self.files[:-1]] or [TextFile(self.files[0], late=False)]
        return self._epochs(files, batch_size, epochs, start_batch)

    def test(self, batch_size: int) -> Iterator[Batch]:
        check_batching(batch_size)
        last = TextFile(self.files[-1], late=None if len(self.files) > 1 else True)
        return self._epochs([last], batch_size, 1, 0)

    def _epochs(self, files: list[TextFile], batch_size: int, epochs: int, skip: int) -> Iterator[Batch]:
        for _ in range(epochs):
            lines = _Lines(files)
            skipped = lines.skip(skip * batch_size)
            skip -= -(-skipped // batch_size)
            while (batch := self._batch(lines, batch_size)) is not None:
                yield batch

    def _batch(self, lines: _Lines, batch_size: int) -> Batch | None:
        labels = np.empty(batch_size, dtype=np.float32)
        counts = np.empty((batch_size, COUNTS), dtype=np.float32)
        ids = np.empty((batch_size, IDS), dtype=np.int64)
        n = lines.fill(labels, counts, ids)
        if n == 0:
            return None
        dense = np.log1p(np.maximum(np.nan_to_num(counts[:n]), 0))
        return one_id_per_table(self.tables, dense, self._rows(ids[:n].T), labels[:n])

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        """Turn ids (26, n) into rows of the tables."""
        if not self.hashed:
            return ids
        rows = np.array([[table.num_embeddings] for table in self.tables], dtype=np.uint64)
        feature = np.arange(len(self.tables), dtype=np.uint64)[:, None] << np.uint64(33)
        return mix64(ids.astype(np.uint64) | feature) % rows


class _Lines:
    """A position in the lines of several files."""

    def __init__(self, files: list[TextFile]) -> None:
        self._text, self._at = np.empty(0, dtype=np.uint8), 0
        self._pieces = self._all_pieces(files)
        self._file, self._line = files[0], 1

    def _all_pieces(self, files: list[TextFile]) -> Iterator[tuple[TextFile, bytes]]:
        for file in files:
            last = b"\n"
            for piece in file.pieces():
                yield file, piece
                last = piece[-1:] or last
            if last != b"\n":
                yield file, b"\n"

    def _more(self) -> bool:
        """Read another piece behind the rest of the text at hand, which is less than a line."""
        file, piece = next(((file, piece) for file, piece in self._pieces if piece), (self._file, b""))
        if not piece:
            return False
        if file != self._file:
            self._file, self._line = file, 1
        new = np.frombuffer(piece, dtype=np.uint8)
        self._text = np.concatenate([self._text[self._at :], new]) if self._at < len(self._text) else new
        self._at = 0
        return True

    def skip(self, lines: int) -> int:
        """Skip that many lines, unparsed; return how many lines there were."""
        left = lines
        while left > 0:
            ends = np.flatnonzero(self._text[self._at :] == _NEWLINE)[:left]
            if len(ends):
                self._at += int(ends[-1]) + 1
                self._line += len(ends)
                left -= len(ends)
            elif not self._more():
                break
        return lines - left

    def fill(self, labels: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> int:
        """Parse lines into the arrays until the arrays are full or the files end; return how many lines."""
        done = 0
        while done < len(labels):
            parsed, self._at, fault = parse_lines(
                self._text, self._at, labels[done:], counts[done:], ids[done:]
            )
            done += parsed
            self._line += parsed
            if fault:
                line = self._file.lines_before() + self._line
                raise InputError(f"{self._file.path}, line {line}: {_describe(fault)}")
            if done < len(labels) and not self._more():
                break
        return done


def _describe(fault: int) -> str:
    expected = "expected a label, 13 integers and 26 hexadecimal ids, tab-separated"
    if fault > 1 + COUNTS + IDS:
        return f"more than {1 + COUNTS + IDS} fields; {expected}"
    kind = "label 0 or 1" if fault == 1 else "integer" if fault <= 1 + COUNTS else "id of up to 8 hex digits"
    return f"field {fault} is not an {kind} or is missing; {expected}".replace("an label", "a label")
