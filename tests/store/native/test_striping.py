"""Segments whose bytes are spread over several devices: every row comes back, all devices work at once, and a
device that fails, is full or lacks a part is one named error."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from tests.store.native.striped_store import (
    CONFIG,
    FOLDERS,
    PER_BLOCK,
    STRIPE,
    check,
    open_on,
    part_sizes,
    put,
    striped,
)
from tierstore import _core
from tierstore.errors import InputError, StoreCorruptError, StoreFullError, StoreIOError, TierStoreError
from tierstore.keys import make_keys
from tierstore.store.native import NativeStore


@pytest.mark.parametrize("io", ["uring", "pread"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_real_files(tmp_path, io, devices):
    folders = [str(tmp_path / name) for name in FOLDERS[:devices]]
    for folder in folders:
        (tmp_path / folder).mkdir()
    config, rng = replace(CONFIG, io=io), np.random.default_rng(devices)
    ids = rng.permutation(60_000)
    for step in range(3):
        env = _core.StripedEnv([(_core.posix_env(folder), folder) for folder in folders], STRIPE)
        with open_on(env, config, folders[0]) as store:
            assert step == 0 or store.count(1) == len(ids)
            put(store, ids, step)
            check(store, rng.permutation(ids)[:20_000], step)
            store.commit(b"")
            check(store, rng.permutation(ids), step)
            scanned = np.concatenate([keys for keys, _ in store.scan()])
            assert np.array_equal(np.sort(scanned), make_keys(1, np.sort(ids)))
            store.compact()
            store.commit(b"")
        env.close()
    in_another_order = (folders[0], *reversed(folders[1:]))
    env = _core.StripedEnv([(_core.posix_env(folder), folder) for folder in in_another_order], STRIPE)
    with open_on(env, config, folders[0]) as store:
        check(store, ids, 2)
    sizes = [sum(file.stat().st_size for file in tmp_path.joinpath(f).glob("*.seg")) for f in folders]
    assert max(sizes) < 1.1 * min(sizes)
    assert _core.verify_store(folders[0], {0: 16, 1: 272}, None, env).findings == []


@pytest.mark.parametrize("change", [-1, 0, 1])
@pytest.mark.parametrize("stripes", [1, 2, 3, 6])
def test_ends_at_and_beside_ends_of_stripes(stripes, change):
    """Rows that end just there, before a commit, which fills its last block, and after it."""
    rows = 2 * PER_BLOCK * stripes + change
    disk = _core.MemoryEnv()
    env = striped([disk, disk])
    with open_on(env) as store:
        put(store, range(rows))
        store.commit(b"")
        put(store, range(rows, 2 * rows))
        store.commit(b"")
        check(store, range(2 * rows))
    with open_on(env) as store:
        check(store, range(2 * rows))
        put(store, range(10))
    assert _core.verify_store("disk", {0: 16, 1: 272}, None, env).findings == []
    first, second = part_sizes(disk)
    blocks = -(-rows // PER_BLOCK) + -(-(rows - (-rows) % PER_BLOCK) // PER_BLOCK)
    assert (first - 8192) + max(0, second - 8192) >= (blocks - 1) * 4096
    assert abs(first - second) <= STRIPE


def test_a_store_of_one_folder_gets_more():
    """Its whole segments stay readable; new ones are spread."""
    disk = _core.MemoryEnv()
    with open_on(disk) as store:
        put(store, range(5_000))
        store.commit(b"")
    assert disk.list("more") == []
    for devices in (2, 3):
        with open_on(striped([disk] * devices)) as store:
            check(store, range(5_000), devices - 2)
            put(store, range(5_000), devices - 1)
            store.commit(b"")
    assert len(disk.list("more")) > 0 < len(disk.list("most"))
    with open_on(striped([disk] * 3)) as store:
        check(store, range(5_000), 2)


# -- devices that fail, are full, or lack something --------------------------------------------


def test_a_full_device_is_left_out_of_new_segments():
    small, large = (_core.FaultEnv(_core.MemoryEnv()) for _ in range(2))
    env = striped([small, large])
    small.set_capacity(1_000_000)
    with open_on(env) as store:
        put(store, range(20_000))  # 6 MB; a share of a segment is 128 KiB, and three must fit
        store.commit(b"")
        check(store, range(20_000))
    with open_on(env) as store:
        check(store, range(20_000))
        put(store, range(10_000), 1)
        store.commit(b"")
        check(store, range(10_000), 1)
        check(store, range(10_000, 20_000))
    assert _core.verify_store("disk", {0: 16, 1: 272}, None, env).findings == []


def overwrite(store: NativeStore) -> None:
    put(store, range(20_000), 1)
    store.commit(b"")


def test_all_devices_are_full():
    devices = [_core.FaultEnv(_core.MemoryEnv()) for _ in range(2)]
    env = striped(devices)
    with open_on(env) as store:
        put(store, range(1_000))
        store.commit(b"")
        for device in devices:
            device.set_capacity(1_000_000)
        with pytest.raises(StoreFullError, match=r"(disk|more)/\d+\.seg.*free some space"):
            overwrite(store)
        for device in devices:
            device.heal()
        with suppress(StoreFullError):  # what a write that was under way then met
            put(store, range(20_000), 2)
        put(store, range(20_000), 2)
        store.commit(b"")
        check(store, range(20_000), 2)


KINDS = ["create", "write", "sync", "remove", "sync_directory", "truncate", "read", "open", "list"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_of_the_second_device_fails_in_turn(kind):
    """One error with the cause, the last commit whole, and a way to go on."""
    failures = 0
    for nth in range(1, 100):
        disk = _core.MemoryEnv()
        second = _core.FaultEnv(disk)
        env, last = striped([disk, second]), 0
        with open_on(env, replace(CONFIG, cap_bytes=1_000_000, segment_bytes=24_576)) as store:
            put(store, range(500), 0)
            store.commit(b"0")
        second.fail(kind, nth, errno.EIO)
        before = second.counts().get(kind, 0)
        try:
            with open_on(env, replace(CONFIG, cap_bytes=1_000_000, segment_bytes=24_576)) as store:
                for version in (1, 2, 3):
                    put(store, range(500), version)
                    store.commit(b"%d" % version)
                    last = version
        except StoreIOError as error:
            failures += error.errno == errno.EIO
        second.heal()
        with open_on(env) as store:
            assert int(store.meta()) == last
            check(store, range(500), last)
            put(store, range(500), 9)
            store.commit(b"9")
        if second.counts()[kind] - before < nth:
            assert failures > 0 or kind == "remove"  # which may fail behind the last call
            return
    pytest.fail("the workload does not end")


@pytest.fixture
def stored():
    """A memory file system with a store of some segments on three devices."""
    disk = _core.MemoryEnv()
    with open_on(striped([disk] * 3)) as store:
        put(store, range(5_000))
        store.commit(b"")
    return disk


def refused(disk: _core.MemoryEnv, text: str) -> None:
    env = striped([disk] * 3)
    before = {f: {name: disk.contents(f"{f}/{name}") for name in disk.list(f)} for f in FOLDERS}
    with pytest.raises(StoreCorruptError, match=text):
        open_on(env)
    assert before == {f: {name: disk.contents(f"{f}/{name}") for name in disk.list(f)} for f in FOLDERS}
    findings = _core.verify_store("disk", {0: 16, 1: 272}, None, env).findings
    assert [item.file for item in findings] == ["00000001.seg"]
    assert findings[0].lost


def test_a_missing_part(stored):
    stored.remove("more/00000001.seg")
    refused(stored, "of its 3 parts 1 are missing")


def test_a_part_of_another_segment(stored):
    stored.set_contents("more/00000001.seg", stored.contents("more/00000002.seg"))
    refused(stored, "more/00000001.seg: does not belong to the part of this segment|is the same part")


def test_a_part_that_is_there_twice(stored):
    stored.set_contents("more/00000001.seg", stored.contents("most/00000001.seg"))
    refused(stored, "00000001.seg: is the same part as one")


def test_a_whole_file_in_place_of_a_part(stored):
    stored.set_contents("most/00000001.seg", b"TSTSEGMT" + bytes(8184))
    refused(stored, "most/00000001.seg: does not belong")


@pytest.mark.parametrize(("at", "text"), [(12, "checksum"), (35, "checksum"), (0, "does not belong")])
def test_a_damaged_header_of_a_part(stored, at, text):
    data = bytearray(stored.contents("more/00000001.seg"))
    data[at] ^= 1
    stored.set_contents("more/00000001.seg", bytes(data))
    refused(stored, text)


def test_an_empty_part(stored):
    stored.set_contents("more/00000001.seg", b"")
    refused(stored, "does not belong")


def test_a_part_that_is_cut_off(stored):
    data = stored.contents("more/00000001.seg")
    stored.set_contents("more/00000001.seg", data[: len(data) // 2])
    env = striped([stored] * 3)
    with pytest.raises(StoreCorruptError, match=r"00000001.seg: the file is cut off at \d+ bytes"):
        open_on(env)
    assert len(_core.verify_store("disk", {0: 16, 1: 272}, None, env).findings) > 0


def test_a_flipped_bit_is_found_on_every_device(stored):
    for folder in FOLDERS:
        data = bytearray(stored.contents(f"{folder}/00000001.seg"))
        data[8192 + 100] ^= 1
        disk = stored.after_crash(stored.operations(), "kept")
        disk.set_contents(f"{folder}/00000001.seg", bytes(data))
        findings = _core.verify_store("disk", {0: 16, 1: 272}, None, striped([disk] * 3)).findings
        assert [(item.file, item.lost) for item in findings] == [("00000001.seg", True)]


def test_parts_without_a_commit_are_removed(stored):
    stored.set_contents("most/00000099.seg", b"x")
    stored.set_contents("more/00000098.seg", stored.contents("more/00000001.seg"))
    stored.set_contents("more/notes.txt", b"mine")
    env = striped([stored] * 3)
    assert sorted(_core.verify_store("disk", {0: 16}, None, env).leftovers) == [
        "00000098.seg",
        "00000099.seg",
    ]
    with open_on(env) as store:
        check(store, range(5_000))
        put(store, range(5_000), 1)
        store.commit(b"")
    names = {name for folder in FOLDERS for name in stored.list(folder)}
    assert not names & {"00000098.seg", "00000099.seg"}
    assert stored.contents("more/notes.txt") == b"mine"
    assert max(names - {"MANIFEST", "notes.txt"}) > "00000099.seg"  # a number is used once


def test_without_one_of_its_folders(stored):
    with pytest.raises(StoreCorruptError, match="of its 3 parts 1 are missing"):
        open_on(striped([stored] * 2))
    with pytest.raises(TierStoreError):
        open_on(stored)
    with open_on(striped([stored] * 3)) as store:
        check(store, range(5_000))


@pytest.mark.parametrize(("folders", "stripe"), [(0, STRIPE), (17, STRIPE), (2, 0), (2, 4095)])
def test_impossible_environments(folders, stripe):
    disk = _core.MemoryEnv()
    with pytest.raises(InputError):
        _core.StripedEnv([(disk, f"d{i}") for i in range(folders)], stripe)
    _core.StripedEnv([(disk, f"d{i}") for i in range(16)], 4096)
