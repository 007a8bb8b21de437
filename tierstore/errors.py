"""Errors that users of tierstore can catch. Wrong arguments raise subclasses of ``ValueError`` too."""

from __future__ import annotations


class TierStoreError(Exception):
    """Base of every error that tierstore raises on purpose."""


class ConfigError(TierStoreError, ValueError):
    """A configuration that cannot work; the message says what would work."""


class DeviceFullError(ConfigError):
    """A GPU, or the host beside it, has no room for the rows of a tier. All ranks raise RankError for it."""


class InputError(TierStoreError, ValueError):
    """Ids, offsets, lengths or weights that do not fit the table; nothing was changed."""


class StoreMismatchError(TierStoreError):
    """A directory holds another table, row layout, optimizer or engine than asked for; the directory is
    untouched."""


class StoreLockedError(TierStoreError):
    """Another process (or object) has the store open."""


class StoreCorruptError(TierStoreError):
    """A record, segment or manifest is damaged; the message names file, offset, table and id."""


class StoreFullError(TierStoreError, OSError):
    """The disk is full or the byte cap of the SSD tier is reached; committed data is intact."""


class StoreIOError(TierStoreError, OSError):
    """The operating system refused a read or write; the original errno is kept."""


class TierFullError(TierStoreError, MemoryError):
    """The memory tiers cannot hold the rows touched and there is no tier below, or the system refuses memory
    for the rows of one batch."""


class PolicyFaultError(TierStoreError, RuntimeError):
    """A policy broke its contract, as by evicting a pinned slot; the message names the slot. No row was
    lost."""


class ClosedError(TierStoreError, RuntimeError):
    """Use of a table or store after close()."""


class GradientError(TierStoreError, ArithmeticError):
    """A gradient was NaN or infinite (``TierConfig(check_gradients=True)``); its rows were not updated."""


class RankError(TierStoreError, RuntimeError):
    """Another rank of the job has died, or did not answer within the timeout."""


class GpuError(TierStoreError, RuntimeError):
    """A GPU, its driver or the compiler of its kernels is missing, too old or has failed."""


class MissingPackageError(TierStoreError, ImportError):
    """A package that a part of tierstore needs, such as torchrec, cannot be imported."""


class InfeasiblePlanError(TierStoreError, ValueError):
    """The tables do not fit the machines. ``binding`` is the resource that is short, ``missing_bytes`` how
    much of it is missing, ``report`` the dictionary of ``tierstore plan --json``."""

    def __init__(self, message: str, binding: str, missing_bytes: int, report: dict | None = None) -> None:
        super().__init__(message)
        self.binding, self.missing_bytes, self.report = binding, missing_bytes, report or {}

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.binding, self.missing_bytes, self.report)
