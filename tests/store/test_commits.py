"""Kept commits: listed, tagged, opened, gone on from, dropped; the same on every engine."""

from __future__ import annotations

import os

import pytest

from tests.store.store_model import CAP, TABLES, assert_holds, put, stored_ids
from tierstore.errors import ConfigError, InputError
from tierstore.store import DirectoryStore, open_store


@pytest.fixture
def kept(tmp_path, engine):
    """``kept(at=…)`` opens the test's directory, which keeps three commits."""
    stores: list[DirectoryStore] = []

    def make(**options) -> DirectoryStore:
        if stores:
            stores[-1].close()
        stores.append(open_store(tmp_path / "store", engine, TABLES, CAP, **{"keep": 3, **options}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def commit_versions(store: DirectoryStore, last: int, tagged: tuple[int, ...] = ()) -> list[int]:
    """Commits versions 1 to ``last`` of the same rows, and one more row each time; some tagged ``v2``."""
    numbers = []
    for version in range(1, last + 1):
        put(store, 1, range(500), version)
        put(store, 0, range(version), version)
        numbers.append(store.commit(b"meta %d" % version, tag=f"v{version}" if version in tagged else None))
    return numbers


def assert_version(store: DirectoryStore, version: int) -> None:
    assert store.meta() == b"meta %d" % version
    assert_holds(store, 1, range(500), version)
    assert stored_ids(store, 0) == list(range(version))


def described(store: DirectoryStore) -> list[tuple[str, bytes]]:
    return [(commit.tag, commit.meta) for commit in store.commits()]


def test_they_are_listed_and_opened_by_number_and_tag(kept):
    store = kept()
    assert store.commits() == []
    numbers = commit_versions(store, 5, tagged=(1, 4))
    expected = [("v1", b"meta 1"), ("", b"meta 3"), ("v4", b"meta 4"), ("", b"meta 5")]
    assert described(store) == expected
    assert [commit.id for commit in store.commits()] == [numbers[0], *numbers[2:]]
    times = [commit.unix_nanoseconds for commit in store.commits()]
    assert times == sorted(times)
    assert times[0] > 10**18
    listed = store.commits()
    assert kept().commits() == listed
    for version in (1, 3, 4, 5):
        assert_version(kept(at=numbers[version - 1]), version)
    for version in (1, 4):
        assert_version(kept(at=f"v{version}"), version)
    assert_version(kept(), 5)


def test_what_is_not_kept_cannot_be_opened(kept):
    store = kept()
    with pytest.raises(InputError, match="there is no commit yet"):
        kept(at=1)
    store = kept()
    numbers = commit_versions(store, 4, tagged=(2,))
    for at in (numbers[0], numbers[-1] + 1, -1, "v1", "V2"):
        with pytest.raises(InputError, match=rf"not kept; kept commits: {numbers[1]} \(\"v2\"\), "):
            kept(at=at)
    assert_version(kept(), 4)


def test_opening_an_old_commit_changes_nothing_until_the_next_one(kept):
    numbers = commit_versions(kept(), 3)
    store = kept(at=numbers[0])
    put(store, 1, range(500), 99)
    assert [commit.id for commit in store.commits()] == numbers
    assert_version(kept(), 3)


def test_going_on_from_an_old_commit(kept):
    numbers = commit_versions(kept(keep=4), 3)
    store = kept(at=numbers[0], keep=4)
    put(store, 0, [77], 9)
    branch = store.commit(b"meta 1", tag="branch")
    assert branch > numbers[-1]
    put(store, 0, [78], 9)
    assert stored_ids(store, 0) == [0, 77, 78]
    store = kept(keep=4)
    assert [commit.id for commit in store.commits()] == [*numbers, branch]
    assert stored_ids(store, 0) == [0, 77]
    assert_holds(store, 1, range(500), 1)
    assert_version(kept(at=numbers[2], keep=4), 3)
    assert_version(kept(at=numbers[1], keep=4), 2)
    assert_version(kept(at=numbers[0], keep=4), 1)
    store = kept(at="branch", keep=4)
    again = store.commit(b"", tag="again")
    assert [commit.id for commit in kept(keep=4).commits()] == [*numbers[1:], branch, again]


def test_dropping(kept):
    store = kept()
    numbers = commit_versions(store, 3, tagged=(1, 3))
    with pytest.raises(InputError, match="newest"):
        store.drop_commit(numbers[2])
    with pytest.raises(InputError, match="not kept"):
        store.drop_commit(numbers[2] + 1)
    store.drop_commit(numbers[1])
    assert described(store) == [("v1", b"meta 1"), ("v3", b"meta 3")]
    with pytest.raises(InputError, match="not kept"):
        store.drop_commit(numbers[1])
    store = kept()
    assert described(store) == [("v1", b"meta 1"), ("v3", b"meta 3")]
    assert_version(store, 3)
    assert_version(kept(at="v1"), 1)


def test_dropping_the_commit_that_is_open(kept):
    numbers = commit_versions(kept(), 2)
    store = kept(at=numbers[0])
    store.drop_commit(numbers[0])
    assert_version(store, 1)
    store.commit(b"meta 1", tag="again")
    store.close()
    assert_version(kept(), 1)
    assert_version(kept(at=numbers[1]), 2)


def test_a_store_opened_with_less_to_keep(kept, tmp_path):
    numbers = commit_versions(kept(), 3)
    store = kept(keep=1)
    assert len(store.commits()) == 3
    put(store, 0, range(4), 4)
    last = store.commit(b"")
    assert [commit.id for commit in store.commits()] == [last]
    assert last == numbers[-1] + 1
    names = [name for _, folders, files in os.walk(tmp_path) for name in [*folders, *files]]
    assert not [name for name in names if name.startswith(f"commit-{numbers[0]:012d}")]


def test_compaction_leaves_kept_commits(kept):
    store = kept()
    commit_versions(store, 3, tagged=(1,))
    store.compact()
    assert_version(store, 3)
    assert_version(kept(at="v1"), 1)
    assert_version(kept(), 3)


def test_the_same_tag_twice_means_the_newer(kept):
    store = kept()
    store.commit(b"old", tag="best")
    store.commit(b"new", tag="best")
    store.commit(b"last")
    assert kept(at="best").meta() == b"new"


def test_arguments(kept, tmp_path, engine):
    store = kept()
    with pytest.raises(InputError, match="tag must be"):
        store.commit(b"", tag=3)
    assert store.commits() == []
    assert store.commit() == 1
    store.close()
    with pytest.raises(ConfigError, match="keep is 0"):
        open_store(tmp_path / "other", engine, TABLES, CAP, keep=0)


def test_open_with_the_engine_and_tables_of_the_directory(kept, tmp_path, engine):
    commit_versions(kept(), 2, tagged=(1,))
    kept().close()
    with open_store(tmp_path / "store", at="v1") as store:
        assert store.engine == engine
        assert_version(store, 1)
