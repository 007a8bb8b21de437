"""Random sequences of calls against a dictionary, for every engine and every Env.

TIERSTORE_STATEFUL_STEPS says how many steps each machine takes in all; `make crash-test` asks for many.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.in_memory import IN_MEMORY
from tests.store import store_model
from tests.store.store_model import (
    CAP,
    ROW_BYTES,
    add_scanned,
    expected_scan,
    get,
    make_rows,
    put,
    scanned,
    stored_ids,
)
from tierstore import _core
from tierstore.errors import ClosedError, InputError
from tierstore.keys import MAX_ID, make_keys
from tierstore.store import RowStore, import_, open_store, verify
from tierstore.store.native import NativeConfig, NativeStore
from tierstore.store.protocol import RowBatch

STEPS = int(os.environ.get("TIERSTORE_STATEFUL_STEPS", "600"))
PER_EXAMPLE = 40
TABLES = [replace(spec, num_embeddings=MAX_ID + 1) for spec in store_model.TABLES]
TABLE_INDICES = st.sampled_from(list(ROW_BYTES))
ID_LISTS = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**32, MAX_ID])), unique=True, max_size=60
)
KEEP = 2
Rows = dict[tuple[int, int], int]


class StoreMachine(RuleBasedStateMachine):
    """A store beside ``newest``, its rows' versions, and ``kept``, what each kept commit must hold."""

    engine: str
    others: bool = True
    """Whether there is a directory that can be exported."""

    @initialize()
    def create(self):
        self.path = tempfile.mkdtemp(prefix="tierstore-test-", dir=IN_MEMORY)
        self.newest: Rows = {}
        self.kept: dict[int, tuple[bytes, str, Rows]] = {}
        self.meta = b""
        self.version = self.number = 0
        self.scans: list[tuple[RowStore, Iterator[RowBatch], dict[int, tuple[int, bytes]], set[int]]] = []
        self.store: RowStore = self.open()

    def open(self, at: int | str = 0, read_only: bool = False) -> RowStore:
        return open_store(
            Path(self.path, "store"), self.engine, TABLES, CAP, keep=KEEP, at=at, read_only=read_only
        )

    @rule(table=TABLE_INDICES, ids=ID_LISTS)
    def write(self, table, ids):
        self.version += 1
        put(self.store, table, ids, self.version)
        self.newest.update({(table, i): self.version for i in ids})

    @rule(table=TABLE_INDICES, ids=ID_LISTS)
    def read(self, table, ids):
        check_rows(self.store, table, ids, self.newest)

    @rule(table=TABLE_INDICES)
    def list_keys(self, table):
        assert stored_ids(self.store, table) == sorted(i for t, i in self.newest if t == table)

    @rule(tables=st.one_of(st.none(), st.lists(TABLE_INDICES, max_size=3)))
    def scan(self, tables):
        chosen = set(ROW_BYTES if tables is None else tables)
        assert scanned(self.store, tables) == rows_of(self.newest, chosen)
        for table in ROW_BYTES:
            assert self.store.count(table) == len([i for t, i in self.newest if t == table])

    @rule(tables=st.one_of(st.none(), st.lists(TABLE_INDICES, min_size=1, max_size=3)))
    def begin_scan(self, tables):
        chosen = set(ROW_BYTES if tables is None else tables)
        self.scans.append((self.store, self.store.scan(tables), rows_of(self.newest, chosen), chosen))

    @precondition(lambda self: self.scans)
    @rule()
    def end_scan(self):
        """All rows that were stored when it began come, as they are now."""
        store, scan, before, chosen = self.scans.pop()
        if store is not self.store:
            with pytest.raises(ClosedError):
                next(scan)
            return
        rows: dict[int, tuple[int, bytes]] = {}
        for batch in scan:
            add_scanned(rows, *batch)
        newest = rows_of(self.newest, chosen)
        assert before.keys() <= rows.keys()
        assert rows.items() <= newest.items()

    @rule(meta=st.binary(max_size=50), tag=st.sampled_from([None, None, None, "a", "b c"]))
    def commit(self, meta, tag):
        number = self.store.commit(meta, tag)
        assert number > self.number
        self.kept[number] = (meta, tag or "", dict(self.newest))
        for old in sorted(self.kept)[:-KEEP]:
            if not self.kept[old][1]:
                del self.kept[old]
        self.number, self.meta = number, meta
        self.list_commits()

    @rule()
    def list_commits(self):
        found = [(commit.id, commit.meta, commit.tag) for commit in self.store.commits()]
        assert found == [(id, meta, tag) for id, (meta, tag, _) in sorted(self.kept.items())]
        assert self.store.meta() == self.meta

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop_commit(self, data):
        number = data.draw(st.sampled_from(sorted(self.kept)))
        if number == max(self.kept):
            with pytest.raises(InputError, match="newest"):
                self.store.drop_commit(number)
            return
        self.store.drop_commit(number)
        del self.kept[number]
        with pytest.raises(InputError, match="not kept"):
            self.store.drop_commit(number)

    @rule()
    def compact(self):
        self.store.compact()

    @rule()
    def reopen(self):
        self.store.close()
        self.meta, _, rows = self.kept[max(self.kept)] if self.kept else (b"", "", {})
        self.newest = dict(rows)
        self.store = self.open()

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), by_tag=st.booleans())
    def reopen_at(self, data, by_tag):
        number = data.draw(st.sampled_from(sorted(self.kept)))
        at: int | str = number
        if by_tag and self.kept[number][1]:
            at = self.kept[number][1]
            number = max(n for n, (_, tag, _) in self.kept.items() if tag == at)
        self.store.close()
        self.meta, _, rows = self.kept[number]
        self.newest = dict(rows)
        self.store = self.open(at)
        self.list_commits()

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def read_only(self, data):
        """What is not committed is lost by that, as by any opening."""
        self.store.close()
        number = data.draw(st.sampled_from(sorted(self.kept)))
        with self.open(number, read_only=True) as store:
            check_all(store, self.kept[number][2])
        self.reopen()

    @precondition(lambda self: self.others)
    @rule(data=st.data(), engine=st.sampled_from(["native", "memory"]))
    def export_and_import(self, data, engine):
        export, again = Path(self.path, "export"), Path(self.path, "again")
        self.store.export(export)
        import_(export, again, engine)
        with open_store(again, read_only=True) as store:
            assert store.meta() == self.meta
            check_all(store, self.newest)
        shutil.rmtree(export)
        shutil.rmtree(again)

    @precondition(lambda self: self.engine == "native")  # others are read in a process of its own
    @rule()
    def check_damage(self):
        self.store.close()
        self.verify()
        self.reopen()

    def verify(self) -> None:
        report = verify(Path(self.path, "store"))
        assert report.ok, report.damage
        assert report.commits == sorted(self.kept)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


class NativeMachine(StoreMachine):
    """The native engine alone, with segments so small that all of them are compacted, on an Env."""

    engine = "native"
    others = False
    directory = "disk"
    snapshots: int

    def open(self, at: int | str = 0, read_only: bool = False) -> RowStore:
        if not hasattr(self, "env"):
            self.env = self.make_env()
        config = NativeConfig(
            cap_bytes=8 << 20,
            segment_bytes=12_288,
            snapshot_min_rows=self.snapshots,
            keep=KEEP,
            at=at,
            read_only=read_only,
        )
        return NativeStore(Path(self.directory), TABLES, config=config, env=self.env)

    def make_env(self):
        raise NotImplementedError

    def verify(self) -> None:
        report = _core.verify_store(self.directory, ROW_BYTES, None, self.env)
        assert [(item.file, item.what) for item in report.findings] == []
        assert report.commits == len(self.kept)


class MemoryEnvMachine(NativeMachine):
    snapshots = 1

    def make_env(self):
        return _core.MemoryEnv()

    @rule(seed=st.integers(0, 2**32), unsynced=st.sampled_from(["lost", "kept", "random"]))
    def crash(self, seed, unsynced):
        """The disk as a crash here would leave it; all commits are durable."""
        env = self.env.after_crash(self.env.operations(), unsynced, seed)
        self.store.close()
        self.env = env
        self.reopen()


class PosixEnvMachine(NativeMachine):
    snapshots = 1 << 20

    def make_env(self):
        self.directory = str(Path(self.path, "disk"))
        os.mkdir(self.directory)
        return None


class FaultEnvMachine(NativeMachine):
    """On a device that fails now and then: an error changes nothing, and once it has gone, work goes on."""

    snapshots = 1

    def make_env(self):
        return _core.FaultEnv(_core.MemoryEnv())

    @rule(kind=st.sampled_from(["write", "sync", "create", "read", "rename"]), nth=st.integers(1, 6))
    def fail(self, kind, nth):
        """The next reopening, with what comes then, meets an error; then the device is mended."""
        self.store.close()
        self.env.fail(kind, nth, 5)
        failed = ""
        try:
            with self.open() as store:
                for table, ids in ((1, range(30)), (7, range(9))):
                    put(store, table, ids, 10**6)
                check_rows(store, 1, range(30), dict.fromkeys([(1, i) for i in range(30)], 10**6))
        except OSError as error:
            failed = str(error)
        assert not failed or "injected" in failed
        self.env.heal()
        self.reopen()


def check_rows(store: RowStore, table: int, ids, rows: Rows) -> None:
    found, out = get(store, table, ids)
    assert found.tolist() == [(table, i) in rows for i in ids]
    for row, (i, there) in enumerate(zip(ids, found, strict=True)):
        if there:
            expected = make_rows(make_keys(table, [i]), ROW_BYTES[table], rows[table, i])
            assert np.array_equal(out[row], expected[0])


def rows_of(rows: Rows, tables: set[int]) -> dict[int, tuple[int, bytes]]:
    """What a scan of ``tables`` gives."""
    expected: dict[int, tuple[int, bytes]] = {}
    for table, version in sorted({(table, version) for (table, _), version in rows.items()}):
        if table in tables:
            ids = [i for (t, i), v in rows.items() if (t, v) == (table, version)]
            expected |= expected_scan(table, ids, version)
    return expected


def check_all(store: RowStore, rows: Rows) -> None:
    for table in ROW_BYTES:
        ids = sorted(i for t, i in rows if t == table)
        assert stored_ids(store, table) == ids
        check_rows(store, table, ids, rows)


def run(machine: type[StoreMachine], share: float = 1) -> None:
    examples = max(2, int(share * STEPS / PER_EXAMPLE))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=PER_EXAMPLE,
            deadline=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )


def test_against_a_dictionary(engine):
    run(type("Machine", (StoreMachine,), {"engine": engine}))


@pytest.mark.parametrize("index", ["hash", "compact"])
@pytest.mark.parametrize("machine", [MemoryEnvMachine, PosixEnvMachine, FaultEnvMachine])
def test_native_on_every_env(machine, index, monkeypatch):
    if index == "compact":
        store_model.use_compact_index(monkeypatch)
    run(machine, share=1)
