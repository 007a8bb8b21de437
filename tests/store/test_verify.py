"""verify() and read-only opening, on every engine: nothing is changed, damage is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.store.store_model import (
    CAP,
    TABLES,
    assert_holds,
    folder_contents,
    plain_user,
    put,
    run_child,
    stored_ids,
)
from tierstore.errors import (
    InputError,
    StoreCorruptError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
)
from tierstore.store import open_store, verify


@pytest.fixture
def folder(tmp_path, engine) -> Path:
    """A store with two commits, the first tagged ``one``."""
    path = tmp_path / "store"
    with open_store(path, engine, TABLES, CAP) as store:
        for version, tag in ((1, "one"), (2, None)):
            put(store, 1, range(300), version)
            put(store, 0, range(version), version)
            store.commit(b"meta %d" % version, tag)
    return path


def test_a_whole_store_is_ok_and_untouched(folder, engine):
    before = folder_contents(folder)
    seen = []
    report = verify(folder, lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.engine, report.commits, report.whole_commits) == (engine, [1, 2], [1, 2])
    assert report.rows >= 603
    assert report.files > 0
    assert seen[-1][0] == seen[-1][1] == report.bytes
    assert json.loads(json.dumps(report.to_dict()))["ok"]
    assert folder_contents(folder) == before


def test_read_only_changes_nothing(folder):
    before = folder_contents(folder)
    with open_store(folder, at="one", read_only=True) as store, open_store(folder, read_only=True) as other:
        assert store.meta() == b"meta 1"
        assert_holds(store, 1, range(300), 1)
        assert stored_ids(store, 0) == [0]
        assert_holds(other, 1, range(300), 2)
        assert [commit.id for commit in other.commits()] == [1, 2]
        for change in (
            lambda: put(store, 1, [1]),
            store.commit,
            store.compact,
            lambda: store.drop_commit(1),
        ):
            with pytest.raises(InputError, match="opened read-only"):
                change()
        with pytest.raises(StoreLockedError):
            open_store(folder)
    with pytest.raises(InputError, match="not kept"):
        open_store(folder, at=3, read_only=True)
    assert folder_contents(folder) == before
    with open_store(folder) as store:
        assert_holds(store, 1, range(300), 2)


def test_a_folder_that_cannot_be_written_to(folder, engine):
    """As another user where this one is root, who may write anywhere."""
    code = (
        "import os, sys; from tierstore.store import get_engine, open_store; get_engine(sys.argv[2])\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "with open_store(sys.argv[1], read_only=True) as store: print(store.stats().rows)"
    )
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chmod(elsewhere, 0o755)
        copy = Path(shutil.copytree(folder, Path(elsewhere, "store")))
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = folder_contents(copy)
        child = run_child(code, copy, engine, stderr=subprocess.PIPE)
        output, errors = child.communicate()
        assert child.returncode == 0, errors
        assert int(output) >= 302
        assert folder_contents(copy) == before
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o755)


def test_a_file_that_this_user_may_not_read_is_no_damage(folder, engine):
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chmod(elsewhere, 0o755)
        copy = Path(shutil.copytree(folder, Path(elsewhere, "store")))
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        closed = max((path for path in copy.rglob("*") if path.parent != copy and path.is_file()), key=str)
        closed.chmod(0)
        with plain_user(), pytest.raises(StoreIOError, match="denied; give a path that this user") as error:
            verify(copy)
        assert str(closed) in str(error.value)
        closed.chmod(0o444)
        assert verify(copy).ok


def test_a_store_in_use_is_refused(folder):
    with open_store(folder), pytest.raises(StoreLockedError, match="in use"):
        verify(folder)


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreMismatchError, match=r"has no TIERSTORE\.json"):
        verify(tmp_path)
    with pytest.raises(StoreMismatchError, match=r"has no TIERSTORE\.json"):
        open_store(tmp_path, "native", TABLES, read_only=True)
    assert os.listdir(tmp_path) == []


def test_links_are_damage(folder, engine):
    (folder / engine / "link").symlink_to("/etc/passwd")
    report = verify(folder)
    assert "symbolic link" in report.damage[0].what
    assert report.whole_commits == []
    with pytest.raises(StoreCorruptError, match="symbolic link"):
        open_store(folder, read_only=True)


def test_damaged_rows_are_found(folder, engine):
    """The middle of every file that has the rows, overwritten."""
    files = [file for file in (folder / engine).rglob("*") if file.is_file() and file.stat().st_size > 30_000]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        half = len(data) // 2
        data[half : half + 5000] = os.urandom(5000)
        file.unlink()  # rocksdb's files are links of one another
        file.write_bytes(data)
    report = verify(folder)
    assert not report.ok
    assert any(item.lost for item in report.damage)
    assert "Restore" in report.advice()[0]


def test_every_byte_of_the_identity_file_flipped(folder):
    file = folder / "TIERSTORE.json"
    whole = file.read_bytes()
    missed = []
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            open_store(folder, read_only=True).close()
            missed.append(at)
        except (StoreCorruptError, StoreMismatchError):
            pass
    start = whole.index(b'"crc32"')
    assert all(start <= at < start + 8 for at in missed), "only the checksum's own name may be damaged unseen"
