"""One commit of all ranks: each rank's store commits, then one file names the commits that belong together.

Of several paths, one for each device, the first has the record, and a rank's store has a folder below each.
``<path>/COMMIT.json``, replaced atomically by rank 0, names the last commit that all ranks have made, and for
each collection its folder (``<generation>/<collection>/rank00000`` ...), its plan, and every rank's commit in
its store. These commits have a tag, so a commit that the file names exists until the file names the next one,
however often jobs are killed in between. Folders that the file does not name can be deleted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePath
from secrets import token_hex
from typing import Any
from urllib.parse import quote

from tierstore.cache.engine import Engine
from tierstore.cache.report import warn_of_uncommitted
from tierstore.errors import (
    ConfigError,
    StoreFullError,
    StoreMismatchError,
    TierStoreError,
)
from tierstore.folders import paths_of
from tierstore.placement import ShardingPlan
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.peers import Peers, in_flight
from tierstore.sharding.record import FORMAT, TAG, read_record, saved_of, write_record
from tierstore.sharding.restore import restore
from tierstore.sharding.shards import RankShards
from tierstore.store import identity
from tierstore.store.devices import StorePath
from tierstore.store.directory import lock_folder
from tierstore.store.lock import FolderLock

logger = logging.getLogger("tierstore")


@dataclass(frozen=True)
class Place:
    """The folders of a rank's store, and the commit at which it opens."""

    folders: tuple[str, ...]
    at: int
    number: int
    """Number of the commit of all ranks; 0 if this store takes part in none."""

    def check_there(self) -> None:
        """Raise StoreMismatchError if the store of the commit of all ranks is gone; opening would make a new
        one."""
        if self.at and not Path(self.folders[0], identity.FILE_NAME).exists():
            raise StoreMismatchError(
                f"{self.folders[0]} is missing, and the last commit of all ranks has rows there; restore a "
                "copy of the folder, or give another path to start anew"
            )

    def check(self, engine: Engine) -> None:
        """Raise StoreMismatchError unless the store is at the commit of all ranks: some engines keep one
        commit only."""
        if not self.number or engine.store is None:
            return
        found = engine.committed_extra().get("commit")
        if found != self.number:
            raise StoreMismatchError(
                f"{self.folders[0]} is at commit {found} and the last one of all ranks is {self.number}; "
                f"engine {engine.config.engine!r} keeps only its own last commit: restore a copy of "
                "the folder"
            )


class Commits:
    """The commits below ``path`` of the collections called ``names``. All ranks make this object and use it
    together.

    Rank 0 has the lock of ``path`` until :meth:`release`, or until all collections are closed. Raises, on all
    ranks, StoreLockedError if another process has it, and StoreMismatchError if the last commit has rows of
    other collections.
    """

    def __init__(self, path: StorePath, env: ShardingEnv, names: Collection[str]) -> None:
        self._paths = [Path(one) for one in paths_of(path)]
        self.path = self._paths[0]
        """The first path, which has the record."""
        self._env = env
        self._lock: FolderLock | None = None
        try:
            record = self._read()
            self._check_names(record.get("collections", {}), names)
        except BaseException:
            self.release()
            raise
        self.number: int = record.get("number", 0)
        """Number of the last commit of all ranks; 0 before the first."""
        self.extra: dict[str, Any] = record.get("extra", {})
        self.saved = {name: saved_of(entry) for name, entry in record.get("collections", {}).items()}
        """The collections of the last commit by name."""
        self._shards: dict[str, RankShards] = {}
        self._folders: dict[str, str] = {}
        self._former_folders: dict[str, str] = {}
        """Folders that only the last commit needs: the next commit does not."""
        self._restored: set[str] = set()
        self._named: list[dict[str, int]] = []
        """By rank, the commits named in the file that are in the present stores."""

    def _read(self) -> dict[str, Any]:
        """Return what rank 0 has read, on all ranks: ranks on other hosts may not see the file."""
        # a name that no interrupted job has used: what is in its folders belongs to no commit
        record: list[Any] = [None, None, token_hex(4)]
        if self._env.rank == 0:
            try:
                self._lock = lock_folder(self.path)
                record[0] = self._read_file()
            except TierStoreError as error:
                record[1] = error
        self._env.broadcast_objects(record)
        if record[1] is not None:
            raise record[1]
        found: dict[str, Any] = record[0]
        self._generation = f"{found.get('number', 0) + 1:06d}-{record[2]}"
        return found

    def _read_file(self) -> dict[str, Any]:
        if (self.path / identity.FILE_NAME).exists():
            raise StoreMismatchError(
                f"{self.path} has the rows of unsharded tables; give the sharded ones another path"
            )
        return read_record(self.path)

    def _check_names(self, saved: Collection[str], names: Collection[str]) -> None:
        """Raise StoreMismatchError for saved collections that the next commit would not have."""
        lost = sorted(set(saved) - set(names))
        if lost:
            raise StoreMismatchError(
                f"the commit in {self.path} has rows of the collections {lost}, and the model has "
                f"{sorted(names)}; give collections the names that they were committed with, and leave none "
                "out, or give another path"
            )

    def release(self) -> None:
        """Give the lock of the path back."""
        if self._lock is not None:
            self._lock.close()

    def leave(self) -> None:
        """Give the lock back if all collections are closed. A collection calls it when it is closed."""
        if all(shards.engine.closed for shards in self._shards.values()):
            self.release()

    def place(self, name: str, plan: ShardingPlan, engine: str) -> Place:
        """Return where this rank's store is: in a new folder if the last commit has another plan."""
        saved = self.saved.get(name)
        if saved is not None and (_geometry(saved.plan), saved.engine) == (_geometry(plan), engine):
            self._folders[name] = saved.folder
            at = saved.ranks[self._env.rank]
            self._named = self._named or [{} for _ in saved.ranks]
            for of_rank, commit in zip(self._named, saved.ranks, strict=True):
                of_rank[name] = commit
            return Place(self._folders_of_rank(name), at, self.number if at else 0)
        # a path in the model may have slashes
        self._folders[name] = f"{self._generation}/{quote(name, safe='') or 'tables'}"
        return Place(self._folders_of_rank(name), 0, 0)

    def _folders_of_rank(self, name: str) -> tuple[str, ...]:
        """Return the folders of this rank's store of a collection: one below each path."""
        own = PurePath(self._folders[name], f"rank{self._env.rank:05d}")
        return tuple(str(path / own) for path in self._paths)

    def join(self, name: str, shards: RankShards) -> None:
        """Add a collection, and restore its rows if the last commit has them."""
        self._shards[name] = shards
        saved = self.saved.get(name)
        if saved is None:
            return
        self._restored.add(name)
        if saved.folder != self._folders[name]:
            restore(shards, self.path / saved.folder, saved.plan, saved.ranks)
            self._former_folders[name] = saved.folder
        shards.fused_optimizer.num_updates = saved.updates

    def restored(self, name: str) -> bool:
        """Return whether the collection began with the rows of a commit."""
        return name in self._restored

    def commit(self, extra: dict[str, Any] | None = None, tag: str | None = None) -> int:
        """Make one commit of all ranks; return its number. All ranks call it.

        ``extra``: plain JSON values; the commit keeps rank 0's. ``tag`` names the commit of each rank's
        store, which then stays until it is dropped. Raises ConfigError on all ranks if one fails, or
        StoreFullError, after which all ranks can try again.
        """
        with self._env.shared_errors():
            extra = _checked(extra)
        # rank 0's: after a save by torch.distributed.checkpoint that failed ranks have counted differently
        sent = [self.begin(extra)]
        self._env.broadcast_objects(sent)
        started = sent[0]
        own: dict[str, int] = {}
        with self._env.shared_errors_or_full():  # or no rank counts this commit as made
            own = self.commit_own(started, tag)
        everyone = self._env.gather_objects(own)
        with self._env.shared_errors_or_full():
            if self._env.rank == 0:
                self.record(started, everyone)
        self._named = everyone
        self.count(started)
        return self.number

    def begin(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return what one rank sends to all to begin a commit of all ranks.

        Then every rank calls :meth:`commit_own`, the one rank :meth:`record`, and every rank :meth:`count`.
        """
        return {"number": self.number + 1, "named": self._named, "extra": extra}

    def commit_own(self, started: dict[str, Any], tag: str | None = None) -> dict[str, int]:
        """Commit this rank's stores; return the commits' numbers by collection.

        Commits of all ranks that no record names are dropped."""
        own: dict[str, int] = {}
        number, named = started["number"], started["named"]
        for name, shards in self._shards.items():
            engine = shards.engine
            if engine.store is None:
                own[name] = engine.uncommitted = 0
                continue
            own[name] = engine.commit({"commit": number}, tag or f"{TAG}{number}")
            kept = {own[name], named[self._env.rank].get(name, 0) if named else 0}
            for commit in engine.commits():
                if commit.tag.startswith(TAG) and commit.id not in kept:
                    engine.drop_commit(commit.id)
        return own

    def count(self, started: dict[str, Any]) -> None:
        """Note that this commit is the last commit now."""
        self.number, self.extra = started["number"], started["extra"]

    def record(self, started: dict[str, Any], everyone: list[dict[str, int]]) -> None:
        """Record the ranks' commits as one commit of all ranks. ``everyone``: numbers by rank."""
        self._write(started["number"], everyone, started["extra"])
        self._named = everyone
        for name, folder in self._former_folders.items():
            logger.info(
                "the rows of %s are in %s from now on; the former folder can be deleted on every host",
                self.path / folder,
                self.path / self._folders[name],
            )
        self._former_folders.clear()

    def commit_last(self) -> None:
        """Commit before the tables are closed, unless the last commit has an ``extra`` (as a checkpoint's
        commit has), which would not fit rows that were trained since."""
        changes = self.uncommitted()
        if lost := self._env.peers.lost:
            logger.warning(
                "%s stays at its last commit: %d updates since then are dropped, for %s",
                self.path,
                changes,
                lost,
            )
        elif not self.extra:
            self.commit()
        elif self._env.rank == 0 and changes:
            warn_of_uncommitted(self.path, self.extra, changes)

    def uncommitted(self) -> int:
        """Return how many updates and calls that overwrote rows this rank has had since the last commit."""
        return sum(shards.engine.uncommitted for shards in self._shards.values())

    def _write(self, number: int, everyone: list[dict[str, int]], extra: dict[str, Any]) -> None:
        collections = {
            name: {
                "folder": self._folders[name],
                "engine": shards.config.engine,
                "plan": shards.plan.to_dict(),
                "ranks": [own[name] for own in everyone],
                "updates": shards.fused_optimizer.num_updates,
            }
            for name, shards in self._shards.items()
        }
        record = {"format": FORMAT, "number": number, "extra": extra, "collections": collections}
        self.path.mkdir(parents=True, exist_ok=True)
        write_record(self.path, record)


def _checked(extra: Any) -> dict[str, Any]:
    """Return ``extra`` as it will be read back. Raises ConfigError if it cannot be."""
    if not isinstance(extra, dict | None):
        raise ConfigError(f"extra is {extra!r}; give a dictionary, or None")
    try:
        found: dict[str, Any] = json.loads(json.dumps(extra or {}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"extra must be plain JSON values: {error}; give other values to checkpoint.save"
        ) from error
    return found


def end(peers: Peers, commits: Commits | None, commit: bool, close_here: Callable[[], None]) -> None:
    """Commit what the ranks have, where ``commit`` asks for that, and call ``close_here``.

    While an error is handled, this rank tells the other ranks that it has stopped. Raises StoreFullError on
    all ranks, whose tables stay open, if a store is full.
    """
    if (error := in_flight(peers.handled)) is not None:
        peers.stop(error)
    stays_open = False
    try:
        if commit and commits is not None:
            commits.commit_last()
    except StoreFullError:
        stays_open = True
        raise
    finally:
        if not stays_open:
            close_here()


def _geometry(plan: ShardingPlan) -> Any:
    tables = {
        table.name: [(s.rank, s.row_start, s.rows, s.column_start, s.columns) for s in table.shards]
        for table in plan.tables
    }
    return plan.world_size, tables
