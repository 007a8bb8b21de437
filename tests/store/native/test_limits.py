"""Each limit of the native store, made small: reached exactly, one short of it, one past it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from tierstore import _core
from tierstore.errors import ConfigError, InputError, StoreCorruptError, StoreFullError, StoreIOError
from tierstore.keys import make_keys
from tierstore.store import StoredTable, open_store
from tierstore.store import identity as identities
from tierstore.store.native import NativeConfig, NativeLimits, NativeStore

SMALL = NativeLimits(chunk_bytes=16_384)


def table_of(row_bytes: int) -> StoredTable:
    return StoredTable("t", 0, 1 << 40, row_bytes // 4, row_bytes)


def open_on(env, row_bytes: int = 272, **options) -> NativeStore:
    config = NativeConfig(**{"cap_bytes": 1 << 30, "limits": SMALL, **options})
    return NativeStore("disk", [table_of(row_bytes)], config=config, env=env)


def rows_of(ids, version: int, row_bytes: int = 272) -> np.ndarray:
    words = np.asarray(ids, np.uint64)[:, None] * np.uint64(1_000_003) + np.arange(
        row_bytes // 8, dtype=np.uint64
    )
    return (words + np.uint64(version)).view(np.uint8)


def put(store: NativeStore, ids, version: int, row_bytes: int = 272) -> None:
    store.write(make_keys(0, ids), rows_of(ids, version, row_bytes))


def holds(store: NativeStore, ids, version: int, row_bytes: int = 272) -> bool:
    out = np.zeros((len(ids), row_bytes), np.uint8)
    return store.read(make_keys(0, ids), out).all() and np.array_equal(out, rows_of(ids, version, row_bytes))


def in_chunk(row_bytes: int, chunk_bytes: int) -> int:
    """Records of a chunk of so many bytes, by the rules of docs/reference/formats.md."""
    record, frame = (row_bytes + 16 + 7) // 8 * 8, 4096
    while frame < 1 << 20 and frame % record * 50 > frame:
        frame *= 2
    return max(1, chunk_bytes // frame) * (frame // record)


@pytest.mark.parametrize("row_bytes", [16, 48, 240, 272, 528, 2064])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_commits_at_the_end_of_chunks(row_bytes, off, chunks):
    """Of segments, too: one holds two chunks."""
    count = chunks * in_chunk(row_bytes, SMALL.chunk_bytes) + off
    segment = 4096 + 2 * max(SMALL.chunk_bytes, 65_536 if row_bytes == 2064 else 0)
    env = _core.MemoryEnv()
    options = {"segment_bytes": segment, "row_bytes": row_bytes}
    with open_on(env, **options) as store:
        for version in range(1, 7):
            put(store, range(count), version, row_bytes)
            store.commit(b"%d" % version)
            if version % 2 == 0:
                store.commit(b"again %d" % version)
        assert holds(store, range(count), 6, row_bytes)
    with open_on(env, **options) as store:
        assert store.meta() == b"again 6"
        assert holds(store, range(count), 6, row_bytes)
        put(store, range(count), 7, row_bytes)
        store.commit(b"7")
    image = env.after_crash(env.operations(), "lost")
    with open_on(image, **options) as store:
        assert holds(store, range(count), 7, row_bytes)
    assert [item.what for item in _core.verify_store("disk", {0: row_bytes}, None, image).findings] == []


@pytest.mark.parametrize(
    ("row_bytes", "count"), [(272, 7168), (16, 65_536), (48, 32_768), (240, 8192), (528, 3840)]
)
def test_commits_at_the_end_of_chunks_of_the_usual_size(tmp_path, row_bytes, count):
    """In a process of its own, for what is guarded against is a crash."""
    code = f"""
import numpy as np
from pathlib import Path
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore
table = StoredTable("t", 0, 1 << 40, {row_bytes // 4}, {row_bytes})
with NativeStore(Path({str(tmp_path)!r}), [table], config=NativeConfig(1 << 33)) as store:
    for version in range(4):
        store.write(make_keys(0, range({count})), np.full(({count}, {row_bytes}), version, np.uint8))
        store.commit(b"%d" % version)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert done.returncode == 0
    with NativeStore(tmp_path, [table_of(row_bytes)], config=NativeConfig(1 << 33)) as store:
        out = np.zeros((count, row_bytes), np.uint8)
        assert store.read(make_keys(0, range(count)), out).all()
        assert (out == 3).all()


LOCATIONS = NativeLimits(locations=64 * 64)
"""64 segments of 42 rows of 272 bytes: 6 bits for the slot."""
PLACES = (64 - 2) * 42
"""Compaction keeps two segments for itself."""


def open_crowded(env) -> NativeStore:
    return open_on(env, segment_bytes=16_384, limits=LOCATIONS)


def test_as_many_rows_as_there_are_locations():
    """Exactly as many can be written, not one more; what is there stays readable and can be committed."""
    env = _core.MemoryEnv()
    with open_crowded(env) as store:
        put(store, range(PLACES), 1)
        with pytest.raises(StoreFullError, match=r"2688 versions of rows of 272 bytes.*divide the tables"):
            put(store, [PLACES], 1)
        assert holds(store, range(PLACES), 1)
        store.commit(b"full")
    with open_crowded(env) as store:
        assert holds(store, range(PLACES), 1)
        with pytest.raises(StoreFullError, match="divide the tables"):
            put(store, [PLACES], 1)


@pytest.mark.parametrize("commits", [False, True])
def test_overwriting_near_the_limit_of_locations_compacts(commits):
    """Superseded versions take locations, too: they are won back, without an end, and reopening goes on."""
    env = _core.MemoryEnv()
    count = PLACES * 3 // 4
    rng = np.random.default_rng(0)
    versions = np.full(count, 1)
    store = open_crowded(env)
    put(store, range(count), 1)
    for version in range(2, 60):
        ids = rng.choice(count, count // 20, replace=False)
        put(store, ids, version)
        versions[ids] = version
        if commits:
            store.commit(b"%d" % version)
        if commits and version % 10 == 0:
            store.close()
            store = open_crowded(env)
    for version in np.unique(versions):
        assert holds(store, np.flatnonzero(versions == version), version)
    store.close()


def manifest_bytes(env) -> int:
    return len(env.contents("disk/MANIFEST"))


def test_a_meta_that_the_manifest_has_no_room_for_is_refused():
    """The largest one that passes can be opened; one byte more changes nothing, and the next commit works."""
    limits = NativeLimits(manifest_bytes=16_000)
    env = _core.MemoryEnv()
    with open_on(env, limits=limits) as store:
        put(store, range(10), 1)
        store.commit(b"")
        spare = 15_000 - manifest_bytes(env)
        put(store, range(10), 2)
        number = store.commit(b"m" * spare)
        assert manifest_bytes(env) == 15_000
        before, kept = env.contents("disk/MANIFEST"), store.commits()
        put(store, range(10), 3)
        with pytest.raises(InputError, match="smaller meta"):
            store.commit(b"m" * (spare + 1))
        assert env.contents("disk/MANIFEST") == before
        assert store.commits() == kept
        assert store.meta() == b"m" * spare
    with open_on(env, limits=limits) as store:
        assert store.meta() == b"m" * spare
        assert holds(store, range(10), 2)
        put(store, range(10), 4)
        assert store.commit(b"small") == number + 1
        assert holds(store, range(10), 4)


def test_more_tagged_commits_than_the_manifest_has_room_for_are_refused():
    limits = NativeLimits(manifest_bytes=4_000)
    env = _core.MemoryEnv()
    with open_on(env, limits=limits) as store:
        made: list[int] = []

        def commit_again_and_again():
            for version in range(100):
                put(store, range(10), version)
                made.append(store.commit(b"meta", "t" * 90 + f"{version}"))

        with pytest.raises(InputError, match="drop commits that have a tag"):
            commit_again_and_again()
        assert len(made) > 20
        assert [commit.id for commit in store.commits()] == made
        store.drop_commit(made[0])
        put(store, range(10), 1000)
        made.append(store.commit(b"meta", "one more"))
    with open_on(env, limits=limits) as store:
        assert [commit.id for commit in store.commits()] == made[1:]
        assert holds(store, range(10), 1000)


@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12 << 30, reason="needs 6 GiB of memory"
)
def test_a_meta_of_a_gibibyte_leaves_the_store_openable(tmp_path):
    table = table_of(16)
    with open_store(tmp_path / "s", "native", [table]) as store:
        store.commit(b"small")
        with pytest.raises(InputError, match="smaller meta"):
            store.commit(bytes(1 << 30))
    with open_store(tmp_path / "s", "native", [table]) as store:
        assert store.meta() == b"small"


def test_a_description_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(identities, "_MAX_BYTES", 2000)
    with open_store(tmp_path / "s", "native", [table_of(16)]) as store:
        store.commit(b"")
    many = [table_of(16), *(StoredTable("n" * 50 + f"{i}", i, 10, 4, 16) for i in range(1, 20))]
    with pytest.raises(ConfigError, match="shorter names"):
        open_store(tmp_path / "s", "native", many)
    with open_store(tmp_path / "s") as store:
        assert len(store.tables) == 1
    with pytest.raises(ConfigError, match="shorter names"):
        open_store(tmp_path / "new", "native", many)


def garbage(env, count: int = 2000) -> NativeStore:
    """A store in which compaction has much to do, and has not begun."""
    store = open_on(env, segment_bytes=16_384, limits=None)
    put(store, range(count), 1)
    store.commit(b"1")
    put(store, range(0, count, 2), 2)
    store.commit(b"2")
    return store


def compacted_bytes(store: NativeStore) -> int:
    """Bytes on disk when compaction has done what it can and its victims are gone."""
    store.compact()
    store.commit(b"compacted")
    store.compact()
    return store.counters()["disk_bytes"]


@pytest.mark.parametrize("kind", ["create", "read", "write", "sync", "remove"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.ENOMEM])
def test_an_error_while_compacting_does_not_spoil_the_victim(kind, code):
    """Whatever failed for once, on whichever side: compaction goes on with the same segments afterwards."""
    env = _core.FaultEnv(_core.MemoryEnv())
    with garbage(env) as store:
        before = store.counters()["disk_bytes"]
        env.fail(kind, 1, code)
        for _ in range(4):
            try:
                store.compact()
                store.commit(b"3")
            except (StoreIOError, StoreFullError, MemoryError) as error:
                if "reopen" in str(error):  # of a commit whose sync failed
                    break
        env.heal()
        if kind == "sync":
            return
        assert compacted_bytes(store) < 0.75 * before
        assert holds(store, range(0, 2000, 2), 2)
        assert holds(store, range(1, 2000, 2), 1)


def test_what_cannot_be_read_is_left_alone_in_the_end():
    """A victim that the device does not give: the error is told some times, then others are compacted."""
    env = _core.FaultEnv(_core.MemoryEnv())
    with garbage(env) as store:
        env.fail("read", 1, errno.EIO, True)
        told = 0
        for _ in range(1000):
            try:
                store.compact()
                break
            except StoreIOError:
                told += 1
        assert 3 <= told < 1000
        env.heal()
        put(store, range(0, 2000, 3), 3)
        store.commit(b"went on")


def test_damage_is_found_by_a_second_reading():
    """Bits that flip on the way, once: no segment is taken for damaged."""
    env = _core.FaultEnv(_core.MemoryEnv())
    with garbage(env) as store:
        before = store.counters()["disk_bytes"]
        env.flip_bits(3)
        try:
            store.compact()
        except StoreCorruptError as error:  # both readings of one
            assert "checksum" in str(error)  # noqa: PT017
        env.heal()
        assert compacted_bytes(store) < 0.8 * before


@pytest.mark.parametrize("dead", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("live", [1, 255, 256, 257, 511, 512, 513])
def test_compaction_of_as_many_rows_as_are_found_together(live, dead):
    """It looks 256 rows of a segment up at once, and copies at most so many; dead ones lie before them."""
    env, row_bytes = _core.MemoryEnv(), 16
    segment = 2 * in_chunk(row_bytes, SMALL.chunk_bytes)  # rows
    with open_on(env, row_bytes, segment_bytes=4096 + 2 * SMALL.chunk_bytes) as store:
        put(store, range(2 * segment), 1, row_bytes)
        gone = [*range(dead), *range(dead + live, segment)]
        put(store, gone, 2, row_bytes)
        store.commit(b"")
        store.compact()
        store.commit(b"")
        assert store.counters()["relocated_rows"] == live
        assert holds(store, range(dead, dead + live), 1, row_bytes)
        assert holds(store, gone, 2, row_bytes)
        assert holds(store, range(segment, 2 * segment), 1, row_bytes)
    with open_on(env, row_bytes) as store:
        assert holds(store, range(dead, dead + live), 1, row_bytes)
        assert holds(store, gone, 2, row_bytes)
