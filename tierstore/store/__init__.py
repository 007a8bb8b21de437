"""The bottom tier: row stores behind one protocol, and the directories that they live in."""

from tierstore.store.directory import DirectoryStore, open_store
from tierstore.store.identity import StoreIdentity, read_identity
from tierstore.store.importing import import_
from tierstore.store.protocol import CommitId, CommitInfo, RowStore, StoredTable, StoreStats
from tierstore.store.registry import StoreOptions, engine_names, get_engine, register_engine
from tierstore.store.verification import Damage, VerifyReport, verify

__all__ = [
    "CommitId",
    "CommitInfo",
    "Damage",
    "DirectoryStore",
    "RowStore",
    "StoreIdentity",
    "StoreOptions",
    "StoreStats",
    "StoredTable",
    "VerifyReport",
    "engine_names",
    "get_engine",
    "import_",
    "open_store",
    "read_identity",
    "register_engine",
    "verify",
]
