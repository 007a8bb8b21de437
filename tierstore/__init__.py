"""Embedding tables larger than memory, trained bit for bit as if in memory.

Names are imported when they are first used: ``import tierstore`` and ``tierstore --help`` cost little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierstore.config import TableOverride, TierConfig
    from tierstore.errors import (
        ClosedError,
        ConfigError,
        InputError,
        StoreCorruptError,
        StoreFullError,
        StoreIOError,
        StoreLockedError,
        StoreMismatchError,
        TierFullError,
        TierStoreError,
    )

_HOME = {
    "config": ["TableOverride", "TierConfig"],
    "errors": [
        "ClosedError",
        "ConfigError",
        "InputError",
        "StoreCorruptError",
        "StoreFullError",
        "StoreIOError",
        "StoreLockedError",
        "StoreMismatchError",
        "TierFullError",
        "TierStoreError",
    ],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = ["data", "errors", "interop", "models", "optim"]

__all__ = [
    "ClosedError",
    "ConfigError",
    "InputError",
    "StoreCorruptError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "StoreMismatchError",
    "TableOverride",
    "TierConfig",
    "TierFullError",
    "TierStoreError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"tierstore.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    value = getattr(import_module(f"tierstore.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
