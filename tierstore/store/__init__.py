"""The bottom tier: row stores behind one protocol, and the directories they live in."""

from tierstore.store.protocol import RowStore, StoreStats, TableSpec
from tierstore.store.registry import StoreOptions, engine_names, get_engine, register_engine

__all__ = [
    "RowStore",
    "StoreOptions",
    "StoreStats",
    "TableSpec",
    "engine_names",
    "get_engine",
    "register_engine",
]
