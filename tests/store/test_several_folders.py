"""Stores spread over several folders: a wrong list of paths is one named error before anything changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.store.store_model import CAP, TABLES, assert_holds, folder_contents, put, stored_ids
from tierstore import TierConfig
from tierstore.errors import (
    ConfigError,
    StoreCorruptError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
)
from tierstore.store import DirectoryStore, import_, open_store, read_identity, verify

ROWS = range(20_000)


def open_on(*paths: Path, **options) -> DirectoryStore:
    return open_store(list(paths), "native", TABLES, CAP, **options)


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """The three folders of a store."""
    paths = [tmp_path / name / "t" for name in ("nvme0", "nvme1", "nvme2")]
    with open_on(*paths) as store:
        put(store, 1, ROWS)
        store.commit(b"made")
    return paths


def refused(paths: list[Path], error: type[Exception], text: str, **options) -> None:
    """The paths are refused, and nothing below the test's folder changes."""
    root = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent.parent
    before, there = folder_contents(root), sorted(root.rglob("*"))
    with pytest.raises(error, match=text):
        open_on(*paths, **options)
    assert folder_contents(root) == before
    assert sorted(root.rglob("*")) == there


def test_what_is_where(folders):
    first, *further = folders
    assert sorted(os.listdir(first)) == ["LOCK", "TIERSTORE.json", "native"]
    assert {"MANIFEST"} <= set(os.listdir(first / "native"))
    assert read_identity(first).format == 3
    assert [device.path for device in read_identity(first).devices] == list(map(str, folders))
    for position, folder in enumerate(further, 1):
        assert sorted(os.listdir(folder)) == ["LOCK", "TIERSTORE-DEVICE.json", "native"]
        assert all(name.endswith(".seg") for name in os.listdir(folder / "native"))
        about = json.loads((folder / "TIERSTORE-DEVICE.json").read_text())
        assert (about["position"], about["first"]) == (position, str(first))


def test_further_paths_in_any_order(folders):
    first, second, third = folders
    for paths in ([first, third, second], [first, second, third]):
        with open_on(*paths) as store:
            assert_holds(store, 1, ROWS)
            put(store, 7, range(100))
            store.commit(b"")
    with open_on(first, third, second, read_only=True) as store:
        assert_holds(store, 7, range(100))


def test_opening_changes_no_identity(folders):
    before = {path: content for path, content in folder_contents(folders[0]).items() if "json" in path}
    open_on(*folders).close()
    after = {path: content for path, content in folder_contents(folders[0]).items() if "json" in path}
    assert before == after


@pytest.mark.parametrize("read_only", [False, True])
def test_a_missing_path_is_named(folders, read_only):
    first, second, third = folders
    refused([first, second], StoreMismatchError, rf"device 2 \(last at {third}\)", read_only=read_only)
    refused([first], StoreMismatchError, rf"device 1 \(last at {second}\), device 2", read_only=read_only)


def test_an_empty_folder_in_place_of_a_device(folders):
    """The mount point of a disk that is not mounted."""
    first, second, third = folders
    third.rename(third.with_name("unmounted"))
    refused(folders, StoreMismatchError, rf"device 2.*{third}: empty, perhaps a disk that is not mounted")
    third.mkdir()
    refused(folders, StoreMismatchError, "not mounted")
    third.rmdir()
    third.with_name("unmounted").rename(third)
    open_on(first, second, third).close()


def test_the_first_path_is_not_mounted(folders):
    first = folders[0]
    first.rename(first.with_name("unmounted"))
    text = f"{folders[1]} is device 1 of the store in {first}, where there is none; perhaps its disk is not"
    refused(folders, StoreMismatchError, text)
    first.mkdir()
    refused(folders, StoreMismatchError, text)


def test_a_further_path_as_the_first(folders):
    first, second, third = folders
    refused(
        [second, first, third], StoreMismatchError, f"{first} is a store of its own|{second} is a further"
    )
    refused([second], StoreMismatchError, f"{second} is a further folder of a store")
    with pytest.raises(StoreMismatchError, match="further folder of a store"):
        read_identity(second)
    with pytest.raises(StoreMismatchError, match="further folder of a store"):
        verify(second)


def test_a_device_of_another_store(folders, tmp_path):
    others = [tmp_path / "other0", tmp_path / "other1"]
    open_on(*others).close()
    first, second, third = folders
    text = "other1 is device 1 of another store, last used from .*other0"
    refused([first, second, others[1]], StoreMismatchError, text)
    refused([*folders, others[1]], StoreMismatchError, text)
    refused([*folders, others[0]], StoreMismatchError, "other0 is a store of its own")
    refused([tmp_path / "new", third], StoreMismatchError, "t is device 2 of another store")
    refused([others[0], others[1], second], StoreMismatchError, "t is device 1 of another store")


def test_a_copy_of_a_device(folders, tmp_path):
    shutil.copytree(folders[1], tmp_path / "copy")
    refused([*folders, tmp_path / "copy"], StoreMismatchError, "are copies of one device; give one")


def test_a_foreign_folder(folders, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").write_bytes(b"x")
    refused([*folders, tmp_path / "photos"], StoreMismatchError, r"not empty \(it has holiday.jpg\)")


def test_a_path_more_adds_a_device(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    with open_store(paths[0], "native", TABLES, CAP) as store:
        put(store, 1, ROWS)
        store.commit(b"")
    assert read_identity(paths[0]).format == 1
    for devices in (2, 3):
        with open_on(*paths[:devices]) as store:
            assert_holds(store, 1, ROWS, devices - 2)
            put(store, 1, ROWS, devices - 1)
            store.commit(b"")
        assert len(os.listdir(paths[devices - 1] / "native")) > 0
    with open_on(*paths) as store:
        assert_holds(store, 1, ROWS, 2)
    assert verify(paths[0]).ok


@pytest.mark.parametrize("step", ["write_identity", "_write", "get_engine"])
def test_a_crash_while_a_device_is_added(tmp_path, monkeypatch, step):
    """What a crash leaves, at any step, is taken by the next opening; the store alone opens, too."""
    from tierstore.store import devices, directory

    first, second = tmp_path / "a", tmp_path / "b"
    open_store(first, "native", TABLES, CAP).close()
    module = {"write_identity": directory.identities, "_write": devices, "get_engine": directory}[step]
    real, calls = getattr(module, step), []

    def dies(*args):
        calls.append(args)
        if step == "write_identity" and len(calls) == 1:
            return real(*args)
        if step == "_write":
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, step, dies)
    monkeypatch.setattr(devices, "_remove_new", lambda *args: None)  # the process is gone by then
    with pytest.raises(KeyboardInterrupt):
        open_on(first, second)
    monkeypatch.undo()
    open_store(first, "native", TABLES, CAP).close()
    with open_on(first, second) as store:
        put(store, 1, ROWS)
        store.commit(b"")
    with open_on(first, second) as store:
        assert_holds(store, 1, ROWS)


def test_a_failed_opening_leaves_nothing(tmp_path, monkeypatch):
    from tierstore.store import directory

    def fail(*args):
        raise StoreIOError("no luck")

    monkeypatch.setattr(directory, "get_engine", lambda name: fail)
    fail.spreads = True
    with pytest.raises(StoreIOError, match="no luck"):
        open_on(tmp_path / "a" / "s", tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_locks_of_all_folders(folders, tmp_path):
    first, second, third = folders
    with open_on(*folders) as store:
        with pytest.raises(StoreLockedError, match=f"{first} is in use"):
            open_on(*folders)
        with pytest.raises(StoreMismatchError, match="further folder of a store"):
            open_store(second, "native", TABLES, CAP)
        shutil.copytree(first, tmp_path / "copy")
        with pytest.raises(StoreLockedError, match=f"{second} is in use"):
            open_on(tmp_path / "copy", second, third)
        with pytest.raises(StoreLockedError, match=f"{second} is in use"):
            open_on(tmp_path / "copy", second, third, read_only=True)
        assert_holds(store, 1, ROWS)
    open_on(*folders).close()


def test_two_stores_want_one_empty_folder(tmp_path):
    with open_on(tmp_path / "a", tmp_path / "b"):
        with pytest.raises(StoreMismatchError, match="b is device 1 of another store"):
            open_on(tmp_path / "c", tmp_path / "b")
        assert not (tmp_path / "c").exists()


# -- lists that no store can have --------------------------------------------------------------


def test_lists_of_paths(tmp_path):
    for paths, text in [
        ([], "list of 0 paths"),
        ([tmp_path / str(i) for i in range(17)], "list of 17 paths; give 1 to 16"),
        ([tmp_path / "a", 3], "it must be a folder's path, a list of them"),
        ([tmp_path / "a", ""], "path is empty"),
        ([tmp_path / "a", "b\0c"], "zero character"),
        ({"a": 1}, "it must be a folder's path"),
    ]:
        for call in (
            lambda paths=paths: open_store(paths, "native", TABLES, CAP),
            lambda paths=paths: TierConfig(path=paths),
        ):
            with pytest.raises(ConfigError, match=text):
                call()
    assert os.listdir(tmp_path) == []
    assert TierConfig(path=[tmp_path]).path == str(tmp_path)
    assert TierConfig(path=[tmp_path / "a", "b"]).paths == (str(tmp_path / "a"), "b")


def test_sixteen_devices(tmp_path):
    with open_on(*(tmp_path / str(i) for i in range(16))) as store:
        put(store, 1, ROWS)
        store.commit(b"")
        assert_holds(store, 1, ROWS)


def test_a_folder_twice_and_one_within_another(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "to-new").symlink_to(tmp_path / "new")
    for paths, text in [
        ([a, a], "are one folder"),
        ([a, b, tmp_path / "x" / ".." / "b"], "are one folder"),
        ([a, tmp_path / "link"], "are one folder"),
        ([tmp_path / "new", tmp_path / "to-new"], "are one folder"),
        ([a, a / "in" / "it"], "lies within"),
        ([b / "it", b], "lies within"),
        ([a, tmp_path / "link" / "deep"], "lies within"),
    ]:
        with pytest.raises(ConfigError, match=text):
            open_on(*paths)
    assert sorted(os.listdir(tmp_path)) == ["a", "link", "to-new"]
    assert os.listdir(a) == []


def test_a_link_that_leads_nowhere(tmp_path):
    """The mount point behind it is gone, or the link leads to itself."""
    (tmp_path / "to-nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for paths, text in [
        ([tmp_path / "to-nowhere"], "to-nowhere is a link to .*gone, which is not there; mount or make"),
        ([tmp_path / "a", tmp_path / "to-nowhere" / "t"], "to-nowhere is a link to .*gone, which is not"),
        ([tmp_path / "loop", tmp_path / "a"], "loop is a link to .*loop, which is not there"),
    ]:
        with pytest.raises(ConfigError, match=text):
            open_on(*paths)
    assert sorted(os.listdir(tmp_path)) == ["loop", "to-nowhere"]


def test_the_file_that_the_system_refuses_is_named(folders, tmp_path):
    long = tmp_path / ("x" * 300)
    with pytest.raises(StoreIOError, match=f"t: {long}: File name too long"):
        open_on(*folders, long)
    lock = folders[1] / "LOCK"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(StoreIOError, match=f"{folders[0]}: {lock}: Is a directory"):
        open_on(*folders)


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match="file is a file"):
        open_on(tmp_path / "a", tmp_path / "file")
    with pytest.raises(StoreIOError, match="Not a directory"):
        open_on(tmp_path / "a", tmp_path / "file" / "below")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("engine", ["rocksdb", "lmdb", "memory"])
def test_engines_of_one_folder(tmp_path, engine):
    with pytest.raises(ConfigError, match=f"engine '{engine}' keeps a store in one folder"):
        open_store([tmp_path / "a", tmp_path / "b"], engine, TABLES, CAP)
    with pytest.raises(ConfigError, match=f"engine '{engine}' keeps a store in one folder"):
        TierConfig(path=[tmp_path / "a", tmp_path / "b"], engine=engine)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "damaged"),
        (b"[]", "not a JSON object"),
        (b'{"format": 2}', "its format is not 1"),
        (b'{"format": 1, "store": 3}', "exactly its fields"),
    ],
)
def test_a_damaged_device_file(folders, content, text):
    (folders[1] / "TIERSTORE-DEVICE.json").write_bytes(content)
    refused(folders, StoreCorruptError, text)


def test_links_in_a_further_folder(folders, tmp_path):
    segments = folders[1] / "native"
    segments.rename(tmp_path / "elsewhere")
    segments.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreCorruptError, match="native is a symbolic link"):
        open_on(*folders)


# -- what finds the folders by itself ----------------------------------------------------------


def test_the_record_names_the_further_folders(folders, tmp_path):
    with open_store(folders[0]) as store:
        assert_holds(store, 1, ROWS)
        store.export(tmp_path / "export")
    assert verify(folders[0]).ok
    import_(tmp_path / "export", tmp_path / "one")
    with open_store(tmp_path / "one") as store:
        assert stored_ids(store, 1) == list(ROWS)


def test_moved_folders(folders, tmp_path):
    moved = [tmp_path / "moved0", tmp_path / "moved1", tmp_path / "moved2"]
    for old, new in zip(folders[1:], moved[1:], strict=True):
        old.rename(new)
    with pytest.raises(StoreMismatchError, match=rf"device 1 \(last at {folders[1]}\)"):
        open_store(folders[0])
    with open_store([folders[0], *moved[1:]]) as store:
        assert_holds(store, 1, ROWS)
    with open_store(folders[0]) as store:
        assert_holds(store, 1, ROWS)
    folders[0].rename(moved[0])
    with pytest.raises(StoreMismatchError, match=r"was last used from .*nvme0.*open it once with all"):
        open_store(moved[0])
    open_store(moved).close()
    assert verify(moved[0]).ok


def test_damage_on_a_further_device(folders):
    part = next((folders[2] / "native").glob("*.seg"))
    data = bytearray(part.read_bytes())
    data[8192 + 50] ^= 1
    part.write_bytes(bytes(data))
    report = verify(folders[0])
    assert [item.file for item in report.damage] == [f"native/{part.name}"]
    part.unlink()
    report = verify(folders[0])
    assert "of its 3 parts 1 are missing" in report.damage[0].what
