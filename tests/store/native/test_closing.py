"""What a closed store leaves in its folder."""

from __future__ import annotations

import pytest

from tests.store.store_model import CAP, TABLES, put
from tierstore.store.native import NativeConfig, NativeStore


def segments(folder) -> set[str]:
    return {path.name for path in folder.glob("*.seg")}


@pytest.mark.parametrize("time", range(15))
def test_files_that_no_commit_needs_are_removed_before_the_end(tmp_path, time):
    """Also where the store is closed before its own thread comes to remove them, as often happens here."""
    config = NativeConfig(cap_bytes=CAP, keep=8)
    store = NativeStore(tmp_path, TABLES, config=config)
    for version in range(4):
        put(store, 1, range(20_000), version)
        store.commit(b"")
    store.compact()
    store.commit(b"")
    for commit in store.commits()[:-1]:
        store.drop_commit(commit.id)
    store.close()
    left = segments(tmp_path)
    NativeStore(tmp_path, TABLES, config=config).close()
    assert left == segments(tmp_path)
