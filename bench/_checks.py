"""Checks of a benchmark's options that know this machine, before the benchmark works."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.cache.machine import check_memory
from tierstore.config import format_bytes, parse_bytes
from tierstore.errors import ConfigError
from tierstore.result_file import option_errors
from tierstore.store.registry import get_engine

if TYPE_CHECKING:
    from tierstore.data import Dataset

LEAST_BYTES = 4 << 20
_RANKS_PER_CORE = 32


def check_batches(dataset: Dataset, batch_size: int, count: int, options: str) -> None:
    """Raise ConfigError if ``count`` batches of ``dataset`` are more memory than this process can have."""
    example = len(dataset.tables) * (8 + 4) + 4 * (dataset.dense_dim + 1)  # an id and a length for each table
    check_memory(count * batch_size * example, f"{count:,} batches", options)


def check_disk(size: float, folders: Sequence[Path] | None, what: str, options: str) -> None:
    """Raise ConfigError if ``what``, of ``size`` bytes, has no room in one of ``folders`` (None: that of
    temporary files)."""
    for folder in folders or [Path(tempfile.gettempdir())]:
        if size > (free := shutil.disk_usage(folder).free):
            raise ConfigError(
                f"{options}: {what} would take {format_bytes(int(size))} in {folder}, where "
                f"{format_bytes(free)} are free; lower one of these options, or give another folder"
            )


def device_file(text: str, option: str, folders: Sequence[Path] | None) -> int:
    """Return the bytes of the file on which a drive is measured. Raises ConfigError for a file that is too
    small to measure, or for which a drive of ``folders`` has no room."""
    size = parse_bytes(text, option)
    if size < LEAST_BYTES:
        raise ConfigError(f"{option} is {text}; a drive is measured on at least {format_bytes(LEAST_BYTES)}")
    check_disk(size, folders, "the file", option)
    return size


def check_ranks(count: int) -> None:
    """Raise ConfigError for more ranks than processes that this machine has a use for."""
    most = _RANKS_PER_CORE * (cores := os.cpu_count() or 1)
    if count > most:
        raise ConfigError(f"--ranks is {count}; the {cores} cores of this machine take at most {most} ranks")


def check_store(text: str | None) -> None:
    """Raise ConfigError for a ``--store`` that is no folder, or that nobody can make."""
    if text is None:
        return
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--store {path} is a file; give a folder")
    with option_errors("--store", path):
        path.mkdir(parents=True, exist_ok=True)


def check_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for a name of ``given`` that is not known."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: there is no {name!r}; there are {', '.join(known)}")


def check_engines(given: Sequence[str]) -> None:
    """Raise ConfigError for a row store of ``--engines`` that is not known, or whose package is missing."""
    for name in given:
        try:
            get_engine(name)
        except ConfigError as error:
            raise ConfigError(f"--engines: {error}") from error


def use_threads(count: int | None) -> None:
    """Let torch and tierstore compute with ``count`` threads; None leaves their numbers. Raises ConfigError
    for more threads than they take."""
    import torch

    from tierstore import set_num_threads

    if count is None:
        return
    set_num_threads(count)  # refuses what torch would not survive
    torch.set_num_threads(count)


@contextmanager
def importing(package: str) -> Iterator[None]:
    """Raise ConfigError where the body imports ``package``, torchrec or fbgemm-gpu, and that fails."""
    import torch

    try:
        yield
    except Exception as error:  # libraries for another torch fail with OSError
        raise ConfigError(
            f"the comparison needs {package}, which cannot be imported: {error}. Install the fbgemm-gpu-cpu "
            f"and torchrec that go with torch {torch.__version__}; 1.8.0 of both goes with torch 2.13"
        ) from error
