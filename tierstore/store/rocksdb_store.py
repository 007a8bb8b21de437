"""The engine `rocksdb`: a log-structured merge tree, through the package rocksdict.

RocksDB runs without a write-ahead log in the folder ``live``. A commit flushes the memtables and makes a
checkpoint, ``commit-N``: a folder of hard links to the sorted files, which are never changed, and a copy
of each small file. The newest commit folder is the state after a crash or a close: opening replaces
``live`` by links to it, or to another kept commit. So a commit costs what changed since the last commit,
and nothing written later can show. The files of a kept commit stay on disk, even when compaction has replaced
them in ``live``.

Keys are big-endian, so that tables are ranges. The key of one zero byte, which sorts before all others,
holds the commit record (:mod:`tierstore.store.commits`), which the file ``commit-N.record`` repeats, so that
commits can be listed. That file is there before the folder, and only the folder counts. After an error of the
device RocksDB refuses further writes until it is opened again, so such an error closes the store.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, repeat
from operator import is_not
from pathlib import Path
from typing import Any

import numpy as np
import rocksdict
from numpy.typing import NDArray

from tierstore.config import format_bytes
from tierstore.errors import StoreCorruptError, StoreFullError, StoreIOError, TierStoreError
from tierstore.keys import ID_BITS, MAX_ID
from tierstore.store.base import StoreBase, as_bytes, scatter
from tierstore.store.commits import find_commit, pack_commit, read_commit
from tierstore.store.files import (
    disk_bytes,
    store_errors,
    supports_direct_io,
    sync_directory,
    write_atomically,
)
from tierstore.store.parallel import Readers
from tierstore.store.protocol import CommitInfo, StoredTable
from tierstore.store.registry import StoreOptions

log = logging.getLogger(__name__)

_COMMIT = b"\0"
_COMMIT_FOLDER = re.compile(r"commit-(\d{12})")
_FULL = re.compile("No space left|quota exceeded|File too large")
_CHUNK = 65_536
_MIB = 1 << 20
_WRITE_BUFFER = 64 * _MIB
_BLOCK_CACHE = 8 * _MIB
_BIG_ENDIAN = np.dtype(">u8")


def _db_options(direct_io: bool) -> rocksdict.Options:
    """Return options for random reads and overwrites of small rows (reasons: docs/reference/engines.md)."""
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_size(4096)
    blocks.set_bloom_filter(10, False)
    blocks.set_block_cache(rocksdict.Cache(_BLOCK_CACHE))
    blocks.set_format_version(5)
    blocks.set_checksum_type(rocksdict.ChecksumType.crc32c())
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_use_direct_reads(direct_io)
    options.set_use_direct_io_for_flush_and_compaction(direct_io)
    options.set_write_buffer_size(_WRITE_BUFFER)
    options.set_max_write_buffer_number(2)
    options.set_max_background_jobs(2)
    options.set_max_open_files(-1)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    return options


class RocksDBStore(StoreBase):
    """Rows in one RocksDB database."""

    engine = "rocksdb"
    io = "rocksdb"

    def __init__(self, path: Path, tables: Sequence[StoredTable], options: StoreOptions) -> None:
        super().__init__(path, tables, options)
        self._readers = Readers(options.read_threads)
        self._unchecked_bytes = 0
        with store_errors(f"opening {path}"):
            self._kept = [read_commit(path / _record_name(number)) for number in _commit_numbers(path)]
            if options.at or self._kept:
                self._current = find_commit(self._kept, options.at, path) if options.at else self._kept[-1]
            current = self._current
            live, self._temporary = path / "live", None
            if options.read_only:
                self._temporary = tempfile.TemporaryDirectory(prefix="tierstore-")
                live = Path(self._temporary.name) / "live"
            else:
                _clean(path)
            _restore(path, current, live, os.symlink if options.read_only else os.link)
        with self._rocksdb_errors("opening"):
            db_options = _db_options(supports_direct_io(live))
            db_options.set_disable_auto_compactions(options.read_only)
            self._db = rocksdict.Rdict(str(live), db_options)
            self._write_options = rocksdict.WriteOptions()
            self._write_options.disable_wal = True  # type: ignore[method-assign,assignment]  # wrong stub
            self._read_options = rocksdict.ReadOptions()
            self._read_options.set_verify_checksums(True)
            self._read_options.set_async_io(True)
            record = self._db.get(_COMMIT)
        if record != (pack_commit(current) if current else None):
            self._db.close()
            raise StoreCorruptError(
                f"{path / _folder_name(current.id if current else 0)} does not hold that commit's record"
            )

    def _read(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        order = np.argsort(keys)  # neighbours may share a block
        with self._rocksdb_errors("reading"):
            values = self._readers.map(self._get, _names(keys[order]))
        found = np.empty(len(keys), np.bool_)
        found[order] = np.fromiter(map(is_not, values, repeat(None)), np.bool_, len(values))
        scatter(list(filter(None, values)), order[found[order]], out, self._path)
        return found

    def _get(self, names: list[bytes]) -> list[bytes | None]:
        values: Any = self._db.get(names, read_opt=self._read_options)  # type: ignore[arg-type]  # invariant
        return values

    def _write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
        self._check_cap(rows.size)
        batch = rocksdict.WriteBatch(raw_mode=True)
        deque(map(batch.put, _names(keys), as_bytes(rows)), maxlen=0)  # run the map, keep nothing
        with self._breaking("writing"), self._rocksdb_errors("writing"):
            self._db.write(batch, self._write_options)

    def _keys(self, table: int) -> Generator[NDArray[np.uint64], None, None]:
        start, last = table << ID_BITS, table << ID_BITS | MAX_ID
        while start <= last:
            with self._rocksdb_errors("reading"):
                following: Iterator[Any] = iter(self._db.keys(from_key=start.to_bytes(8, "big")))
                names = b"".join(islice(following, _CHUNK))
                if len(names) < 8 * _CHUNK:
                    self._check_end(names[-8:] or start.to_bytes(8, "big"))
            chunk = np.frombuffer(names, _BIG_ENDIAN).astype(np.uint64)
            chunk = chunk[chunk <= last]
            if not len(chunk):
                return
            start = int(chunk[-1]) + 1
            yield chunk

    def _check_end(self, last: bytes) -> None:
        """Raise if damage behind the key ``last`` ended the iteration, which RocksDB does not report."""
        probe = self._db.iter(self._read_options)
        probe.seek(last + b"\0")
        probe.status()
        if probe.valid():
            raise StoreCorruptError(f"{self._path}: the keys behind {last.hex()} cannot be listed")

    def _commit(self, commit: CommitInfo) -> None:
        record = pack_commit(commit)
        with (
            self._breaking("committing"),
            self._rocksdb_errors("committing"),
            store_errors(f"committing {self._path}"),
        ):
            self._db.put(_COMMIT, record, write_opt=self._write_options)
            write_atomically(self._path / _record_name(commit.id), [record])
            rocksdict.Checkpoint(self._db).create_checkpoint(str(self._path / _folder_name(commit.id)))
            sync_directory(self._path)

    def _compact(self) -> None:
        with self._rocksdb_errors("compacting"):
            self._db.compact_range(None, None)

    def _space(self) -> tuple[int, int, int, int]:
        with self._rocksdb_errors("reading"):
            rows = max(0, self._property("estimate-num-keys") - 1)  # less the commit record
            memory = self._property("cur-size-all-mem-tables") + self._property("estimate-table-readers-mem")
            memory += self._property("block-cache-usage")
            live = self._property("estimate-live-data-size") + self._property("cur-size-active-mem-table")
        sizes = self._sizes.known()
        return rows, rows * sizes[0] if len(sizes) == 1 else live, disk_bytes(self._path), memory

    def _release(self) -> None:
        self._readers.close()
        try:
            self._db.close()
        except Exception as error:  # it flushes rows that the next opening removes, so nothing is lost
            log.warning("closing %s: %s", self._path, error)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _remove(self, commit: CommitInfo) -> None:
        folder = self._path / _folder_name(commit.id)
        if folder.exists():
            unnamed = folder.with_name(folder.name + ".tmp")  # half a folder must not look like a commit
            folder.rename(unnamed)
            shutil.rmtree(unnamed)
        (self._path / _record_name(commit.id)).unlink(missing_ok=True)
        sync_directory(self._path)

    def _property(self, name: str) -> int:
        return self._db.property_int_value(f"rocksdb.{name}") or 0

    def _check_cap(self, new_bytes: int) -> None:
        """Look at the disk every few megabytes, since RocksDB has no cap of its own."""
        self._unchecked_bytes += new_bytes
        if self._unchecked_bytes < min(_WRITE_BUFFER, self._cap // 16):
            return
        used = disk_bytes(self._path) + self._property("cur-size-all-mem-tables")
        if used + new_bytes > self._cap:
            raise StoreFullError(
                f"{self._path} takes {format_bytes(used)} of its cap of {format_bytes(self._cap)}; raise "
                "ssd, or commit more often, since the files of kept commits stay beside the newer ones"
            )
        self._unchecked_bytes = 0

    @contextmanager
    def _rocksdb_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (TierStoreError, OSError):
            raise
        except Exception as error:  # rocksdict raises no narrower class
            text = f"{doing} {self._path}: {error}"
            if _FULL.search(str(error)):
                raise StoreFullError(errno.ENOSPC, f"{text}; free some space") from error
            if "Corruption" in str(error):
                raise StoreCorruptError(text) from error
            raise StoreIOError(text) from error


def _commit_numbers(path: Path) -> list[int]:
    """Return the numbers of all commits, ascending."""
    return sorted(int(match[1]) for match in map(_COMMIT_FOLDER.fullmatch, os.listdir(path)) if match)


def _clean(path: Path) -> None:
    """Remove the last process's working files, and files that a crash left."""
    whole = {_record_name(number) for number in _commit_numbers(path)}
    for name in os.listdir(path):
        if name == "live" or (name.endswith(".tmp") and (path / name).is_dir()):
            shutil.rmtree(path / name)
        elif name.endswith((".record", ".tmp")) and name not in whole:
            (path / name).unlink()


def _restore(path: Path, commit: CommitInfo | None, live: Path, link: Callable[[str, Path], None]) -> None:
    """Make the new folder ``live`` the state of ``commit``, with links to files that never change."""
    live.mkdir()
    if commit is not None:
        for entry in os.scandir(path / _folder_name(commit.id)):
            _link_or_copy(os.path.abspath(entry.path), live / entry.name, link)


def _link_or_copy(source: str, target: Path, link: Callable[[str, Path], None]) -> None:
    """Link a sorted file, which never changes, where links work; copy a file that RocksDB still writes."""
    if source.endswith(".sst"):
        with suppress(OSError):
            link(source, target)
            return
    if not source.endswith(".json"):  # the Python package's settings, which opening writes again
        shutil.copyfile(source, target)


def _folder_name(number: int) -> str:
    return f"commit-{number:012d}"


def _record_name(number: int) -> str:
    return f"commit-{number:012d}.record"


def _names(keys: NDArray[np.uint64]) -> list[bytes]:
    return keys.astype(_BIG_ENDIAN).view("V8").tolist()
