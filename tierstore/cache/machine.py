"""Checks that this machine has the memory and disk that a configuration asks for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tierstore.config import TierConfig, format_bytes
from tierstore.errors import ConfigError


def check_machine(config: TierConfig) -> None:
    """Raise ``ConfigError`` for budgets beyond this machine, and for a path whose parent does not exist.

    ``TierConfig(overcommit=True)`` allows such budgets: of swap space, or of a disk that grows.
    """
    if not isinstance(config, TierConfig):
        raise ConfigError(f'config is {config!r}; give a TierConfig, such as TierConfig(hbm="64MiB")')
    for path in config.paths:
        check_parent(Path(path), "path")
    if config.overcommit:
        return
    _check_memory(config)
    if config.ssd not in ("auto", 0) and config.engine != "memory":
        disk = file_system_bytes(config.paths)
        if disk and int(config.ssd) > disk:
            raise ConfigError(
                f"ssd is {format_bytes(int(config.ssd))}, and the file system of "
                f"{config.where or tempfile.gettempdir()} has {format_bytes(disk)}; lower it, leave it out "
                "to take what the disk has, or set overcommit=True"
            )


def _check_memory(config: TierConfig) -> None:
    if config.keeps_all:
        return
    ahead = 0 if config.read_ahead == "auto" else int(config.read_ahead)
    budgets = {"hbm": 0 if config.on_gpu else int(config.hbm), "uvm": int(config.uvm), "read_ahead": ahead}
    memory = sum(budgets.values())
    if memory > (there := host_memory()):
        *names, last = [
            name for name, size in budgets.items() if size or (name == "uvm" and not config.on_gpu)
        ]
        what = f"{', '.join(names)} and {last} are" if names else f"{last} is"
        raise ConfigError(
            f"{what} {format_bytes(memory)}, and this process can have {format_bytes(there)} of memory; "
            f"lower {'them' if names else 'it'}, or set overcommit=True"
        )


def check_memory(size: float, what: str, options: str) -> None:
    """Raise ``ConfigError`` if ``what``, of ``size`` bytes, is more memory than this process can have;
    ``options``: those of a command that may be lowered."""
    if size > (there := host_memory()):
        raise ConfigError(
            f"{options}: {what} would take {format_bytes(int(size))} of memory, and this process can have "
            f"{format_bytes(there)}; lower one of these options"
        )


def check_lockable(budget: int, rows: int) -> None:
    """Raise ``ConfigError`` if ``rows`` bytes of ``uvm`` are more memory than a GPU can be given now. Such
    memory cannot be swapped out, so what other processes use counts."""
    free, most = psutil.virtual_memory().available, host_memory()
    if rows > (there := min(free, most)):
        raise ConfigError(
            f"uvm is {format_bytes(budget)}, and its rows take {format_bytes(rows)} of memory that is locked "
            f"for the GPU, of which {format_bytes(there)} of {format_bytes(most)} are there; lower uvm, "
            "or end what else uses memory"
        )


def check_parent(folder: Path, what: str) -> None:
    """Raise ``ConfigError`` if the parent of ``folder`` is missing: its disk may not be mounted."""
    parent = folder.absolute().parent
    if not parent.exists():
        missing = next(p for p in reversed([parent, *parent.parents]) if not p.exists())
        raise ConfigError(
            f"{what} is {folder}, but {missing} does not exist; mount the disk that belongs there, or create "
            f"the folder (mkdir -p {parent})"
        )


def host_memory() -> int:
    """Return the bytes of memory that this process can have: the machine's, or the limit of its control
    groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _group_limits(own: Path, mounted: Path) -> Iterator[int]:
    """Yield the limits of the control groups that ``own`` lists (version 2 and 1), and of the groups around
    them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = mounted / controllers
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # not there, "max"
                yield int((place / name).read_text())
            if place == root:
                break


def file_system_bytes(paths: Sequence[str]) -> int:
    """Return the sizes of the file systems of folders that may not exist yet; 0 if one does not say.

    No path stands for the folder of temporary files."""
    sizes: dict[int, int] = {}
    for path in paths or [tempfile.gettempdir()]:
        folder = Path(path).absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        try:
            found = os.statvfs(there)
        except OSError:
            return 0
        if not found.f_blocks:
            return 0
        sizes[there.stat().st_dev] = found.f_blocks * found.f_frsize
    return sum(sizes.values())
