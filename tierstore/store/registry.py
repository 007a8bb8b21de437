"""Engines by name. An engine is a class (or function) that opens a folder and returns a :class:`RowStore`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.config import ENGINE_NAMES
from tierstore.errors import ConfigError
from tierstore.store.protocol import RowStore, StoredTable


@dataclass(frozen=True)
class StoreOptions:
    """Options of an engine besides its folder and tables."""

    ssd_bytes: int
    """Hard cap on the bytes of all files of the store."""
    io: str = "auto"
    """"auto", "uring" or "pread"; engines with one kind of IO ignore it."""
    read_threads: int = 16
    """Threads over which rocksdb and lmdb, whose reads block, spread a batch; 1 means the caller alone."""
    keep: int = 1
    """Commits without a tag to keep: the next commit drops the oldest beyond that.
    docs/reference/engines.md says what a kept commit costs in each engine."""
    at: int | str = 0
    """The kept commit to open at, by number or tag; 0 for the last. Later commits are kept, and the next
    commit follows this one."""

    read_only: bool = False
    """Change nothing on disk, so that a store can be read where writing is not allowed."""
    index: str = "auto"
    """Form of the native store's index: "auto", "hash" or "compact"; other engines ignore it."""
    further: tuple[Path, ...] = ()
    """The engine's own folders on further devices, for engines that take them (:func:`check_spreads`)."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keep is {self.keep}; a store keeps at least its last commit")


EngineFactory = Callable[[Path, Sequence[StoredTable], StoreOptions], RowStore]
"""Called with the engine's own folder, which exists, is locked, and holds only files of this engine."""

_FACTORIES: dict[str, EngineFactory | str] = {
    "native": "tierstore.store.native:NativeStore",
    "rocksdb": "tierstore.store.rocksdb_store:RocksDBStore",
    "lmdb": "tierstore.store.lmdb_store:LMDBStore",
    "memory": "tierstore.store.memory:MemoryStore",
}


def engine_names() -> list[str]:
    """Return the names of all registered engines."""
    return list(_FACTORIES)


def register_engine(name: str, factory: EngineFactory | str) -> None:
    """Add an engine: a factory, or "module:attribute" of one, imported at first use."""
    if name in _FACTORIES:
        raise ConfigError(f"engine {name!r} is already registered; choose another name")
    _FACTORIES[name] = factory
    ENGINE_NAMES.append(name)


def get_engine(name: str) -> EngineFactory:
    """Return the factory of an engine.

    Raises ``ConfigError`` where ``name`` is unknown, with the known ones, or where its package is missing.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"unknown engine {name!r}; known engines: {', '.join(_FACTORIES)}")
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"engine {name!r} needs the package {missing.name}, which is not installed: pip install "
                f"{missing.name}, or use engine='native'"
            ) from missing
        _FACTORIES[name] = factory
    return factory


def check_spreads(engine: str) -> None:
    """Raise ``ConfigError`` unless the engine's factory has ``spreads = True``: it takes several folders."""
    if not getattr(get_engine(engine), "spreads", False):
        raise ConfigError(
            f"engine {engine!r} keeps a store in one folder, and path has several; give one path, or "
            'engine="native"'
        )
