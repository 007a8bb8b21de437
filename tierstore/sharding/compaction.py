"""Compacts the stores of a sharded training, one by one, and keeps their commit of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tierstore.sharding.record import TAG, write_record
from tierstore.sharding.stored import rank_folders, read_commit
from tierstore.store.directory import lock_folder, open_store

_KEEP_ALL = 1 << 30
_COMPACTED = ("native", "rocksdb")


def compact_ranks(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Copy the newest rows of each rank's store out of files that hold few of them; return the number of
    stores.

    The record of the commit of all ranks names each store's new commit as soon as it is made, so an
    interruption leaves the commit whole. Newer commits that no record names are dropped; tagged ones stay.
    Raises ``StoreLockedError`` while the training runs.
    """
    lock = lock_folder(path)
    try:
        record, collections = read_commit(path)
        folders = {name: rank_folders(path, saved) for name, saved in collections.items()}
        places = [(name, rank, one) for name, of in folders.items() for rank, one in enumerate(of) if one]
        for done, (name, rank, folder) in enumerate(places):
            ranks = record["collections"][name]["ranks"]
            if collections[name].engine in _COMPACTED:
                with open_store(folder, keep=_KEEP_ALL, at=ranks[rank]) as store:
                    (last,) = (commit for commit in store.commits() if commit.id == ranks[rank])
                    store.compact()
                    ranks[rank] = store.commit(last.meta, last.tag or None)
                    write_record(path, record)
                    for commit in store.commits():
                        unnamed = commit.tag.startswith(TAG) and commit.id != ranks[rank]
                        if unnamed or commit.id == last.id:
                            store.drop_commit(commit.id)
            progress(done + 1, len(places))
        return len(places)
    finally:
        lock.close()
