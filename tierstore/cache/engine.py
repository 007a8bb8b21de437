"""The engine of a module (or of a whole offloaded model): its tables, their tiers and the one store below."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from cache_policies.table_curve import TableCurve, planner_document
from tierstore import _core
from tierstore.cache.at_exit import end_at_exit
from tierstore.cache.commit_meta import parse_meta
from tierstore.cache.device import ComputedRows, open_device
from tierstore.cache.group import TierGroup
from tierstore.cache.layout import IdSegment
from tierstore.cache.loss import has_ended, warns_of_loss
from tierstore.cache.opening import GroupOpening, stored_table
from tierstore.cache.process import OwnProcess
from tierstore.cache.report import report, table_curve, warn_of_uncommitted
from tierstore.cache.row_access import overwrite_rows, read_columns, reset_rows, touched_ids
from tierstore.cache.table import Table as Table
from tierstore.cache.tiers.sizes import as_policy
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.cache.versions import Versions
from tierstore.config import TierConfig
from tierstore.errors import ClosedError, ConfigError, InputError, StoreFullError
from tierstore.optim.specs import OptimizerSpec
from tierstore.store.commits import find_commit
from tierstore.store.directory import DirectoryStore, open_store
from tierstore.store.protocol import CommitInfo, StoredTable

logger = logging.getLogger("tierstore")

META_VERSION = 1


class Engine:
    """Tables, tiers and store. ``optimizer``: of :mod:`tierstore.optim`, for tables without one of their own;
    ``keep``, ``at``: of StoreOptions.

    Lookups are thread-safe with respect to one another; ``close`` waits for a plan in progress.
    """

    waits = False
    """Whether the tables are not opened yet, as a :class:`LateEngine` may be."""
    on_meta = False
    """Whether the tables are on torch's meta device, and have no rows."""

    def __init__(
        self,
        tables: Sequence[Table],
        config: TierConfig,
        optimizer: OptimizerSpec,
        seed: int = 0,
        *,
        keep: int = 1,
        at: int | str = 0,
    ) -> None:
        if not tables:
            raise ConfigError("at least one table is needed; give a list of tables")
        config.check_tables(table.origin or table.name for table in tables)
        if len({table.name for table in tables}) < len(tables):
            raise ConfigError(f"table names must differ: {[table.name for table in tables]}")
        for table in tables:
            config.check_dtype(table.origin or table.name, table.dtype)
        self.config = config
        self.optimizer = optimizer
        self.tables = list(tables)
        self.seed = seed
        self.specs = self._stored_tables()
        self.updates: dict[str, int] = {}
        """Fused optimizer steps so far of each module that uses the engine; committed with the rows."""
        self.checkpoint = ""
        """Tag of the last checkpoint that the rows come from (older: its folder's id), committed too."""
        self.uncommitted = 0
        """Updates, and calls that overwrote rows, since the last commit."""
        self._after_moves: list[WeakMethod[Callable[[], None]]] = []
        self._updated: set[ComputedRows] = set()  # beside the rows of the tables; see prepare()
        self._process = OwnProcess()
        self._closing = threading.Lock()
        self.closed = False
        self.policy = as_policy(config.policy)
        self._keep = keep
        self._open(at)
        end_at_exit(self)

    @property
    def device_name(self) -> str:
        """The device of the rows in ``hbm``, as torch names it."""
        return self.device.name

    # -- construction --------------------------------------------------------------------

    def _open(self, at: int | str) -> None:
        """Open the device and the store, and empty tiers."""
        self.device = open_device(self.config.device)
        self.store: DirectoryStore | None = None
        with ExitStack() as undo:
            undo.callback(self.device.close)
            self._open_tiers(at, undo)
            undo.pop_all()
        self._group_of = {table: group for group in self.groups for table in group.tables}

    def _open_tiers(self, at: int | str, undo: ExitStack) -> None:
        config = self.config
        opening = GroupOpening(self.tables, self.specs, config, self.optimizer, self.policy, self.device)
        self.device.prepare(opening.computed(), self._updated)
        if config.ssd:
            opens = partial(open_store, io=config.io, keep=self._keep, at=at, index=config.index)
            self.store = opens(config.path, config.engine, self.specs, config.ssd_cap)
            undo.callback(self.store.close)
        self.groups = opening.groups(self.store)
        self._load_meta()
        self._position = at or max((commit.id for commit in self.commits()), default=0)
        """The commit that the store was opened at or made last."""
        self.warn_of_loss = warns_of_loss(self, config.where, self.groups)

    def _stored_tables(self) -> list[StoredTable]:
        pairs = enumerate(self.tables)
        return [stored_table(index, table, self.config, self.optimizer, self.seed) for index, table in pairs]

    def _load_meta(self) -> None:
        meta = self.store.meta() if self.store is not None else b""
        result = parse_meta(meta, self.config.where)
        self.updates = {name: int(n) for name, n in result.get("updates", {}).items()}
        self.checkpoint = str(result.get("checkpoint", result.get("checkpoints", "")))
        self.versions = Versions(self.specs, result.get("versions", {}) if meta else None)

    # -- lookups -------------------------------------------------------------------------

    def group_of(self, table: int) -> TierGroup:
        return self._group_of[table]

    def check_open(self) -> None:
        self._process.check()
        if self.closed:
            raise ClosedError("the tables are closed; build the module again to use them")

    def need_rows(self) -> None:
        """Open the tables, unless they are open."""
        self.check_open()

    def prepare(self, updated: Collection[ComputedRows]) -> None:
        """Make the device ready for updates of such rows, which are in no table: now, or before the tables
        are opened. Raises ``GpuError``, and then nothing has changed."""
        if not self.waits and not self._updated.issuperset(updated):
            self.device.prepare(updated=updated)
        self._updated.update(updated)

    def table_index(self, name: str | None) -> int:
        """Return the index of a table by name; None is allowed where there is only one."""
        names = [table.name for table in self.tables]
        if name is None and len(names) > 1:
            raise InputError(f"name a table; there are {names}")
        if name is not None and name not in names:
            raise InputError(f"there is no table {name!r}; the tables are {names}")
        return 0 if name is None else names.index(name)

    def _batch_of(self, table: int, ids: NDArray[np.int64]) -> _core.Batch:
        name, rows = self.tables[table].name, self.tables[table].num_embeddings
        segment = IdSegment(name, ids.ctypes.data, len(ids), False, table, rows)
        return self._group_of[table].batch([segment])

    # -- rows ----------------------------------------------------------------------------

    def read_rows(
        self, table: int, ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return weights (n, dim) and optimizer state (n, state floats) of ``ids`` (n,), copies; nothing
        changes."""
        self.check_open()
        layout = self._group_of[table].layout
        end = layout.dim + layout.state_floats
        weight, state = self.read_columns(table, ids, [slice(0, layout.dim), slice(layout.dim, end)])
        return weight, state

    def read_columns(
        self, table: int, ids: NDArray[np.int64], columns: Sequence[slice]
    ) -> list[NDArray[np.float32]]:
        """Return copies of ``columns`` of the rows of ``ids`` (n,): weights come first, then state."""
        self.check_open()
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tables[table].num_embeddings:
            self._batch_of(table, ids)  # this raises, and names the position among all ids
        return read_columns(self._group_of[table], partial(self._batch_of, table), ids, columns)

    def state_as_of(self, table: int, ids: NDArray[np.int64], update: int) -> NDArray[np.float32]:
        """Return the optimizer state of ``ids`` (n,) as if update number ``update`` were their last. Tables
        whose state has that number in its last float."""
        _, state = self.read_rows(table, ids)
        state[:, -1] = update
        return state

    def write_rows(
        self,
        table: int,
        ids: NDArray[np.int64],
        weight: NDArray[np.float32] | None,
        state: NDArray[np.float32] | None,
    ) -> None:
        """Overwrite weights and/or optimizer state of ``ids``, which must not repeat; None leaves that
        part."""
        self.check_open()
        ids = np.ascontiguousarray(ids, np.int64)
        batch = self._batch_of(table, ids)
        if len(batch.unique) != len(ids):
            raise InputError(f"{self.tables[table].name}: ids repeat; give every row once")
        layout = self._group_of[table].layout
        self.changed([table])

        def change(rows: NDArray[np.uint8], part: slice) -> None:
            values = layout.widened(rows)
            if weight is not None:
                values[:, : layout.dim] = weight[part]
            if state is not None:
                values[:, layout.dim : layout.dim + layout.state_floats] = state[part]
            layout.narrow(values, rows)

        overwrite_rows(self._group_of[table], batch, change)

    def reset_rows(self, table: int) -> None:
        """Give the rows of a table their initial values and state again."""
        self.check_open()
        self.changed([table])
        reset_rows(self._group_of[table], table)

    def touched_ids(self, table: int) -> Iterator[NDArray[np.int64]]:
        """Yield the ids that some tier holds a row of, in chunks, each once; all other rows have their
        initial values."""
        self.check_open()
        return touched_ids(self._group_of[table], table)

    def changed(self, tables: Sequence[int]) -> None:
        """Note that rows of ``tables`` change: they get new versions, and there is something to commit."""
        self.versions.changed(tables)
        self.uncommitted += 1

    # -- state ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all dirty rows down to the store (not durable before :meth:`commit`)."""
        self.check_open()
        for group in self.groups:
            group.flush()

    def commit(self, extra: dict[str, object] | None = None, tag: str | None = None) -> int:
        """Flush, make everything durable as one commit, and return its number. ``extra``: plain JSON
        values; ``tag``: a name by which the commit can be opened too."""
        self.check_open()
        if self.store is None:
            raise ConfigError("there is no ssd tier to commit to; set ssd and path in TierConfig")
        before = self.uncommitted
        self.flush()
        meta = {
            "version": META_VERSION,
            "updates": self.updates,
            "checkpoint": self.checkpoint,
            "versions": self.versions.to_meta(),
            "extra": extra or {},
        }
        self._position = uninterrupted(partial(self.store.commit, json.dumps(meta).encode(), tag))
        self.uncommitted -= before
        for group in self.groups:
            group.stats.uncommitted_rows = 0
        return self._position

    def commits(self) -> list[CommitInfo]:
        """Return the commits that the store keeps, oldest first; none without a store."""
        self._process.check()
        return [] if self.store is None else uninterrupted(self.store.commits)

    def drop_commit(self, id: int) -> None:
        """Drop a commit that is not the newest."""
        self.check_open()
        if self.store is not None:
            uninterrupted(partial(self.store.drop_commit, id))

    def go_to(self, commit: int) -> None:
        """Bring the tables back to a commit that the store keeps; later commits and changes are lost.

        Raises ``ConfigError`` while a prefetch runs, ``InputError`` for a commit that is not kept. If the
        store does not open any more, the tables are closed.
        """
        self.check_open()
        find_commit(self.commits(), commit, self.config.where)
        if self._position == commit and all(group.is_empty() for group in self.groups):
            self._load_meta()
            return
        if any(group.prefetches for group in self.groups):
            raise ConfigError("a prefetch is running on these tables; close it first")
        self.close(commit=False)
        self.groups, self._group_of = [], {}
        self._open(commit)
        self.uncommitted, self.closed = 0, False
        for method in filter(None, [known() for known in self._after_moves]):
            method()

    def call_after_moves(self, method: Callable[[], None]) -> None:
        """Call a module's method, of which no reference is kept, after every :meth:`go_to`."""
        self._after_moves.append(WeakMethod(method))

    def committed_extra(self) -> dict[str, Any]:
        """Return the ``extra`` of the last commit."""
        self._process.check()
        meta = uninterrupted(self.store.meta) if self.store is not None else b""
        return parse_meta(meta, self.config.where).get("extra", {})

    def close(self, *, commit: bool = True) -> None:
        """Commit (if there is a store with a path) and release everything. Calling it again does
        nothing, and neither does a call in a forked child.

        A last commit with an ``extra`` stays the last commit, since the extra would not fit rows that were
        trained since; a warning says so. At a ``StoreFullError`` the tables stay open, with all rows: give
        room (``set_ssd``) and close again, or drop the uncommitted changes with ``commit=False``. A store
        that a failed change has ended (``rocksdb``, ``lmdb``) is released, though its error is raised.
        """
        if not self._process.is_here:
            return
        with self._closing:
            if self.closed:
                return
            closed, last = True, None
            try:
                if commit and self.store is not None and self.config.path is not None:
                    last = self.commits()[-1:]
                    if not (extra := self.committed_extra()):
                        self.commit()
                    elif self.uncommitted:
                        warn_of_uncommitted(self.config.where, extra, self.uncommitted)
            except BaseException as error:  # perhaps Ctrl-C: the commit goes on, and may be made
                ended = has_ended(self.store)
                closed = ended or not isinstance(error, StoreFullError)
                if closed and (ended or last in (None, self.commits()[-1:])):
                    uninterrupted(self.warn_of_loss)
                raise
            finally:
                self.closed = closed
                if closed:
                    uninterrupted(self._release)

    def _release(self) -> None:
        self.warn_of_loss.detach()
        with ExitStack() as closing:  # closes the store also if a tier raises
            closing.callback(self.device.close)
            if self.store is not None:
                closing.callback(self.store.close)
            for group in reversed(self.groups):
                closing.callback(group.close)

    def end_at_exit(self) -> None:
        """Say what is lost, and close without a commit: the process ends."""
        self.warn_of_loss()
        self.close(commit=False)

    # -- statistics ----------------------------------------------------------------------

    def reset_stats(self) -> None:
        self._process.check()
        for group in self.groups:
            uninterrupted(group.stats.reset)

    def stats(self) -> dict[str, Any]:
        """Return counters since the last reset, sizes now: ``tiers`` (hit rates per access and per unique
        row), ``memory`` (bytes), ``tables`` (estimated footprint and misses by cache size, since the engine
        was opened; rows, hits and misses of each table in every tier), ``store``, and the counters of
        ``cache.stats.GroupCounters``; ``groups`` has the same per row layout."""
        result = report(self.groups, self.curves())
        if self.store is not None and not self.closed:
            result["store"] = vars(uninterrupted(self.store.stats))
        return result

    def table_curves(self) -> dict[str, Any]:
        """Return miss-ratio curves of the tables as estimated since the engine was opened, as plain JSON:
        ``tierstore plan --stats`` reads it (docs/reference/policies.md)."""
        return planner_document("live", self.curves())

    def curves(self) -> list[TableCurve]:
        """Return the curves of :meth:`table_curves`, of all tables."""
        self._process.check()
        for group in self.groups:
            uninterrupted(group.stats.count_rest)
        return [table_curve(spec, self._group_of[spec.index].curves) for spec in self.specs]


def set_num_threads(count: int) -> None:
    """Set the threads that the native kernels may use, at least 1; results do not depend on it."""
    if count < 1:
        raise ConfigError(f"the number of threads is {count}; it must be at least 1")
    try:
        _core.set_num_threads(count)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the number of threads is {count}: {error}") from error
