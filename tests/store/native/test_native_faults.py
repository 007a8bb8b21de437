"""A device that fails: errors surface, committed rows stay, work goes on; damage is reported or harmless."""

from __future__ import annotations

import errno
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.density import every
from tierstore import _core
from tierstore.errors import StoreCorruptError, StoreFullError, StoreIOError, TierStoreError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

TABLES = (StoredTable("a", 0, 1 << 40, 4, 16), StoredTable("b", 1, 1 << 40, 64, 272))
CONFIG = NativeConfig(cap_bytes=1_000_000, segment_bytes=16_384)
WITH_SNAPSHOTS = replace(CONFIG, snapshot_min_rows=1)
IDS = range(400)


def open_on(env, config: NativeConfig = CONFIG) -> NativeStore:
    return NativeStore("disk", TABLES, config=config, env=env)


def rows_of(keys: np.ndarray, version: int, row_bytes: int = 272) -> np.ndarray:
    words = keys[:, None] * np.uint64(1_000_003) + np.arange(row_bytes // 8, dtype=np.uint64)
    return (words + np.uint64(version)).view(np.uint8)


def put(store: NativeStore, ids, version: int) -> None:
    store.write(make_keys(1, ids), rows_of(make_keys(1, ids), version))


def version_of(store: NativeStore, ids=IDS) -> int:
    """The one version in which all rows are."""
    keys = make_keys(1, ids)
    out = np.zeros((len(keys), 272), np.uint8)
    assert store.read(keys, out).all()
    version = int((out.view(np.uint64)[:1, 0] - keys[:1] * np.uint64(1_000_003))[0])
    assert np.array_equal(out, rows_of(keys, version))
    return version


def write_versions(store: NativeStore, first: int, last: int) -> int:
    """Overwrites all rows again and again, commits each version; returns the last that was committed."""
    committed = 0
    try:
        for version in range(first, last):
            put(store, IDS, version)
            store.commit(b"%d" % version)
            committed = version
    except TierStoreError as error:
        store.error = error  # type: ignore[attr-defined]
    return committed


KINDS = ["create", "write", "sync", "rename", "remove", "sync_directory", "truncate", "read"]


@pytest.mark.parametrize(("code", "config"), [(errno.EIO, CONFIG), (errno.ENOSPC, WITH_SNAPSHOTS)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_fails_in_turn(kind, code, config):
    """Whichever operation fails: one error with the cause, the last commit intact, and a way to go on.

    The index is saved without being asked for, so a failure of that is no error.
    """
    for nth in range(1, 200):
        disk = _core.MemoryEnv()
        faulty = _core.FaultEnv(disk)
        with open_on(faulty, config) as store:
            assert write_versions(store, 1, 3) == 2
        faulty.fail(kind, nth, code)
        before = faulty.counts().get(kind, 0)
        committed, failed = 2, None
        try:
            with open_on(faulty, config) as store:
                committed = write_versions(store, 3, 7) or 2
                failed = getattr(store, "error", None)
                if failed is not None:
                    committed = go_on_after(store, failed, committed)
        except TierStoreError as error:  # opening failed
            failed = error
        with open_on(disk) as store:
            reached = int(store.meta())
            assert version_of(store) == reached
            # A commit that failed at its last step may be in force.
            assert reached == committed or (kind in ("rename", "sync_directory") and reached == committed + 1)
        if faulty.counts().get(kind, 0) - before < nth:
            return  # the workload has no more of these
        if kind != "remove" and config is CONFIG:  # a removal may fail behind the last call
            assert isinstance(failed, StoreFullError if code == errno.ENOSPC else StoreIOError)
            assert failed.errno == code
    pytest.fail("the workload does not end")


def go_on_after(store: NativeStore, failed: TierStoreError, committed: int) -> int:
    """The error came once. Reads work; either commits do too, or they say why not."""
    assert "injected" in str(failed)
    version_of(store, range(5))
    version = 50
    try:
        put(store, IDS, version)
        store.commit(b"%d" % version)
        return version
    except StoreIOError as error:
        assert "reopen" in str(error)  # noqa: PT017
        return committed


def test_full_device_at_every_size():
    """The device is full at each size in turn, for good; then there is room again and work goes on."""
    for capacity in range(0, 400_000, 12_288):
        disk = _core.MemoryEnv()
        faulty = _core.FaultEnv(disk)
        faulty.set_capacity(capacity)
        try:
            store = open_on(faulty)
        except StoreFullError:
            continue
        committed = write_versions(store, 1, 6)
        assert committed == 5 or isinstance(store.error, StoreFullError)
        faulty.heal()
        with NativeStoreCopy(disk) as copy:
            assert (int(copy.meta() or b"0")) == committed
        commit_despite_earlier_failures(store, 9)
        assert version_of(store) == 9
        store.close()
        with open_on(disk) as store:
            assert version_of(store) == 9


def commit_despite_earlier_failures(store: NativeStore, version: int) -> None:
    """What the two background threads, of writing and of compaction, did when the device was still full, may
    be told now or only when they come to it: once each, by whatever call is next then."""
    for _ in range(2):
        try:
            put(store, IDS, version)
            store.commit(b"%d" % version)
            return
        except StoreFullError as error:
            assert "No space left" in str(error)  # noqa: PT017
    put(store, IDS, version)
    store.commit(b"%d" % version)


class NativeStoreCopy(NativeStore):
    """What a crash now would leave, opened."""

    def __init__(self, disk) -> None:
        super().__init__("disk", TABLES, config=CONFIG, env=disk.after_crash(disk.operations(), "lost"))


def small_store(segments: int = 1):
    """A disk with a store of two row sizes; and all versions' keys."""
    disk = _core.MemoryEnv()
    config = NativeConfig(cap_bytes=1_000_000, segment_bytes=8192, snapshot_min_rows=1)
    with open_on(disk, config) as store:
        for version in range(1, segments + 1):
            put(store, range(20), version)
        keys = make_keys(0, range(10))
        store.write(keys, rows_of(keys, 3, 16))
        store.commit(b"whole")
    open_on(disk, config).close()  # removes what compaction had no time to
    return disk, config, segments


def check_harmless_or_reported(disk, config, version: int) -> bool:
    """Whether damage was reported; what is returned is right in any case."""
    try:
        with open_on(disk, config) as store:
            assert store.meta() == b"whole"
            tables = ((1, range(20), 272, version), (0, range(10), 16, 3))
            return any([is_damage_reported(store, *table) for table in tables])
    except (StoreCorruptError, StoreIOError) as error:
        assert "disk/" in str(error)  # noqa: PT017
        return True


def is_damage_reported(store: NativeStore, table: int, ids, row_bytes: int, version: int) -> bool:
    """Whether a read of these rows was refused; then each row by itself is right or refused by its name."""

    def is_right(some) -> bool:
        keys = make_keys(table, some)
        out = np.zeros((len(keys), row_bytes), np.uint8)
        return store.read(keys, out).all() and np.array_equal(out, rows_of(keys, version, row_bytes))

    try:
        assert is_right(ids)
        return False
    except StoreCorruptError as error:
        assert f"table {table}, id " in str(error)  # noqa: PT017
    reported = 0
    for i in ids:
        try:
            assert is_right([i])
        except StoreCorruptError as error:
            assert f"table {table}, id {i}" in str(error)  # noqa: PT017
            reported += 1
    assert reported
    return True


@pytest.mark.parametrize(("versions", "stride"), [(1, every(3)), (3, every(11))])
def test_every_byte_flipped(versions, stride):
    disk, config, version = small_store(versions)
    reported = 0
    for name in disk.list("disk"):
        path, whole = f"disk/{name}", disk.contents(f"disk/{name}")
        for at in range(0, len(whole), stride):
            if not any(whole[at - at % 512 : at - at % 512 + 512]) and at % 61:
                continue  # padding, sampled
            image = disk.after_crash(disk.operations(), "kept")
            image.set_contents(path, whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            was_reported = check_harmless_or_reported(image, config, version)
            reported += was_reported
            assert was_reported or name != "MANIFEST"
    assert reported > 20 * 272 / stride


def test_truncation_at_every_length():
    disk, config, version = small_store(3)
    for name in disk.list("disk"):
        path, whole = f"disk/{name}", disk.contents(f"disk/{name}")
        step = 1 if name == "MANIFEST" else 37
        for length in [*range(0, len(whole), step), len(whole) - 1]:
            image = disk.after_crash(disk.operations(), "kept")
            image.set_contents(path, whole[:length])
            was_reported = check_harmless_or_reported(image, config, version)
            assert was_reported or name != "MANIFEST"
        image = disk.after_crash(disk.operations(), "kept")
        image.remove(path)
        assert check_harmless_or_reported(image, config, version) or name == "INDEX"


def test_a_device_that_returns_wrong_and_short_reads():
    disk = _core.MemoryEnv()
    faulty = _core.FaultEnv(disk)
    with open_on(faulty) as store:
        write_versions(store, 1, 2)
    with open_on(faulty) as store:
        faulty.flip_bits(3)
        faulty.shorten_reads(5)
        wrong = 0
        for i in IDS:
            keys = make_keys(1, [i])
            out = np.zeros((1, 272), np.uint8)
            try:
                assert store.read(keys, out).all()
                assert np.array_equal(out, rows_of(keys, 1))
            except StoreCorruptError:
                wrong += 1
        assert wrong > 10
        faulty.heal()
        assert version_of(store) == 1


def test_a_slow_device():
    disk = _core.MemoryEnv()
    faulty = _core.FaultEnv(disk)
    faulty.slow_down(0.001)
    with open_on(faulty) as store:
        assert write_versions(store, 1, 4) == 3
        assert version_of(store) == 3


def test_a_segment_that_could_not_be_made_leaves_its_name_behind():
    """A file may be there although making it failed: the store goes on with the next name, and opening
    removes what is left."""
    disk = _core.MemoryEnv()
    faulty = _core.FaultEnv(disk)
    with open_on(faulty) as store:
        faulty.fail("create", 1, errno.ENOSPC)
        with pytest.raises(StoreFullError) as failed:
            put(store, IDS, 1)
        left = re.search(r"\d{8}\.seg", str(failed.value))[0]
        disk.set_contents(f"disk/{left}", b"left")
        put(store, IDS, 2)
        store.commit(b"2")
        assert version_of(store) == 2
    with open_on(disk) as store:
        assert version_of(store) == 2
        assert left not in disk.list("disk")
