"""Verification: reads and checks every byte of a store directory, and names what is damaged.

``native`` has a checksum over every record and structure, so each byte that a kept commit needs is covered.
``memory`` has checksums of files, ``rocksdb`` of blocks. ``lmdb`` has no checksums: verification walks its
tree from end to end, in a separate process, since a bad page may kill the process that reads it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tierstore import _core
from tierstore.errors import StoreCorruptError, StoreIOError, TierStoreError
from tierstore.keys import ID_BITS, MAX_ID
from tierstore.store.devices import FurtherFolders, folders_of, recorded_folders
from tierstore.store.directory import NO_CAP, check_no_links, open_store
from tierstore.store.files import JSON, store_errors, walk_files
from tierstore.store.identity import StoreIdentity, check_has_rows, read_identity
from tierstore.store.lock import lock_for_reading
from tierstore.store.native import files_of
from tierstore.store.protocol import CommitInfo, StoredTable

Progress = Callable[[int, int], None]
"""Called with bytes done, and bytes in all."""


@dataclass(frozen=True)
class Damage:
    """A damaged stretch of a file."""

    file: str
    """Path within the store directory."""
    offset: int
    bytes: int
    what: str
    lost: bool
    """Whether committed rows, or the index to them, are lost; False: the store works without these bytes."""
    commits: list[int]
    """Kept commits that need the bytes."""
    tables: list[str]
    """Tables that may have rows there."""
    rows: list[str]
    """The first damaged rows, as "table NAME, id N", where a footer tells them."""


@dataclass
class VerifyReport:
    """The result of a verification."""

    path: str
    engine: str
    damage: list[Damage] = field(default_factory=list)
    damage_total: int = 0
    """The number of damaged stretches; ``damage`` has the first thousand."""
    files: int = 0
    bytes: int = 0
    rows: int = 0
    """Row versions that were checked, superseded ones included."""
    commits: list[int] = field(default_factory=list)
    """The kept commits."""
    leftovers: list[str] = field(default_factory=list)
    """Files that a crash left; the next opening removes them."""
    foreign: list[str] = field(default_factory=list)
    """Files that are not the store's."""

    @property
    def ok(self) -> bool:
        """Tell whether nothing is damaged."""
        return not self.damage_total

    @property
    def whole_commits(self) -> list[int]:
        """Return the kept commits that no damage touches."""
        damaged = {commit for item in self.damage for commit in item.commits}
        if any(item.lost and not item.commits for item in self.damage):
            return []  # not even the list of commits is known
        return [commit for commit in self.commits if commit not in damaged]

    def advice(self) -> list[str]:
        """Say what to do now, one sentence per line."""
        lines = []
        if any(item.lost for item in self.damage):
            lines.append(
                "Rows are lost. Restore the directory from a copy or an export; the device may be failing, "
                "so look at its health (smartctl) and the kernel's log first."
            )
            if self.whole_commits:
                newest = self.whole_commits[-1]
                lines.append(
                    f"Commit {newest} is whole: open the store at={newest}, or save it with "
                    f"tierstore export {self.path} TARGET --at {newest}"
                )
        if any("saved index" in item.what for item in self.damage):
            index = Path(self.path) / self.engine / "INDEX"
            lines.append(f"Remove {index}: it only makes opening faster, and is rebuilt.")
        if any(not item.lost for item in self.damage) and not any(item.lost for item in self.damage):
            lines.append("No row is lost. Commit, or export and import, to have it written anew.")
        return lines

    def to_dict(self) -> JSON:
        """Return the report as plain JSON values."""
        return {"ok": self.ok, **asdict(self), "whole_commits": self.whole_commits, "advice": self.advice()}


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> VerifyReport:
    """Check the store directory ``path``, which must not be in use, and change nothing in it.

    ``progress`` is called now and then and may raise to stop. Raises ``StoreLockedError`` when the store is
    open elsewhere, ``StoreMismatchError`` when ``path`` has no store, and ``StoreCorruptError`` when its
    TIERSTORE.json is damaged, without which nothing else can be checked, ``StoreIOError`` when this user may
    not read a file. The report has other damage.
    """
    (folder,) = folders_of(path)
    with store_errors(f"verifying {folder}"), lock_for_reading(folder), ExitStack() as undo:
        identity = read_identity(folder)
        report = VerifyReport(os.fspath(folder), identity.engine)
        own = folder / identity.engine
        further = FurtherFolders(folder, recorded_folders(folder, identity)[1:], identity.engine)
        further.check(identity, read_only=True)
        further.share_locks(undo)
        try:
            check_has_rows(folder, identity)
            for place in (own, *further.engine_folders):
                check_no_links(place)
                _check_readable(place)
        except (StoreCorruptError, FileNotFoundError) as error:
            _lost(report, identity.engine, str(error))
            return report
        show = progress or (lambda done, total: None)
        if identity.engine == "native":
            _verify_native(own, further.engine_folders, identity, report, show)
        else:
            _verify_by_opening(own, identity, report, show)
        return report


def _check_readable(folder: Path) -> None:
    """Raise ``PermissionError`` for a file that this user may not read, which is no damage."""
    for entry in walk_files(folder):
        if not os.access(entry.path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), entry.path)


def _lost(report: VerifyReport, file: str, what: str, commits: Sequence[int] = ()) -> None:
    report.damage.append(Damage(file, 0, 0, what, True, list(commits), [], []))
    report.damage_total += 1


def _verify_native(
    own: Path, further: Sequence[Path], identity: StoreIdentity, report: VerifyReport, progress: Progress
) -> None:
    row_bytes = {spec.index: spec.row_bytes for spec in identity.tables}
    names = {spec.index: spec.name for spec in identity.tables}
    own = own.absolute()
    with closing(files_of(own, further)) as files:
        found = _core.verify_store(str(own), row_bytes, progress, files)
    fill_report(report, found, names)
    if not any(item.file.endswith("MANIFEST") for item in report.damage):
        report.commits = [commit[0] for commit in _core.kept_commits(str(own))]


def fill_report(report: VerifyReport, found: _core.VerifyReport, names: dict[int, str]) -> None:
    """Add the core's findings to the report; ``names`` has the tables' names by index."""
    report.damage += [_damage(report.engine, item, names) for item in found.findings]
    report.damage_total += found.findings_total
    report.files, report.bytes, report.rows = found.files, found.bytes, found.records
    report.leftovers, report.foreign = found.leftovers, found.foreign


def _damage(engine: str, item: _core.Finding, names: dict[int, str]) -> Damage:
    def name(table: int) -> str:
        return names.get(table, f"number {table}")

    rows = [f"table {name(key >> ID_BITS)}, id {key & MAX_ID}" for key in item.keys]
    tables = [name(table) for table in item.tables]
    file = f"{engine}/{item.file}"
    return Damage(file, item.offset, item.bytes, item.what, item.lost, item.commits, tables, rows)


def _verify_by_opening(own: Path, identity: StoreIdentity, report: VerifyReport, progress: Progress) -> None:
    """Open each kept commit and read all rows, in another process, which damaged files may kill."""
    report.files, report.bytes = _size(own)
    code = "import sys; from tierstore.store.verification import read_everything as f; f(sys.argv[1])"
    command = [sys.executable, "-c", code, os.fspath(own.parent.absolute())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            for line in child.stdout:
                _take_line(line.rstrip("\n").split(" ", 2), report, progress)
            messages = child.stderr.read().strip().splitlines()
        except BaseException:
            child.kill()
            raise
    if child.returncode < 0:
        _lost(report, identity.engine, f"reading it killed the process (signal {-child.returncode})")
    elif child.returncode:
        raise StoreIOError(f"verifying {own}: {messages[-1] if messages else 'the reading process failed'}")
    progress(report.bytes, report.bytes)


def _take_line(words: list[str], report: VerifyReport, progress: Progress) -> None:
    """Add a line that :func:`read_everything` printed to the report."""
    if words[0] == "commit":
        report.commits.append(int(words[1]))
    elif words[0] == "rows":
        report.rows += int(words[1])
        progress(int(int(words[2]) / 1e6 * report.bytes), report.bytes)
    else:
        commits = [int(words[1])] if words[1] != "0" else []
        _lost(report, report.engine, words[2], commits)


def read_everything(path: str) -> None:
    """Read all rows of each commit and print the findings.

    Each line is ``commit N``, ``rows COUNT MILLIONTHS-DONE`` or ``damage N WHAT``.
    """
    try:
        with open_store(path, read_only=True, ssd_bytes=NO_CAP) as store:
            commits = store.commits()
    except TierStoreError as error:
        print("damage 0", " ".join(str(error).split()), flush=True)
        return
    for commit in commits:
        print("commit", commit.id, flush=True)
    for position, commit in enumerate(commits):
        try:
            _read_commit(path, commit, position, len(commits))
        except TierStoreError as error:
            print("damage", commit.id, " ".join(str(error).split()), flush=True)


def _read_commit(path: str, commit: CommitInfo, position: int, commits: int) -> None:
    specs: Sequence[StoredTable] = read_identity(path).tables
    with open_store(path, read_only=True, at=commit.id) as store:
        for number, spec in enumerate(specs):
            done = int(1e6 * (position + (number + 1) / len(specs)) / commits)
            for keys, _ in store.scan([spec.index]):
                if int(keys.max()) & MAX_ID >= spec.num_embeddings:
                    raise StoreCorruptError(f"table {spec.name!r} has an id beyond its num_embeddings")
                print("rows", len(keys), done, flush=True)


def _size(folder: Path) -> tuple[int, int]:
    """Count the files below ``folder`` and their bytes."""
    sizes = [entry.stat().st_size for entry in walk_files(folder)]
    return len(sizes), sum(sizes)
