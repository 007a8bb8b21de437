"""Files that commands write their results to: checked before the work, written after it."""

from __future__ import annotations

import errno
import glob
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError

_STALE_S = 60


class ResultFile:
    """A file for results; made sure of before the work that it is for, and replaced whole.

    What is no regular file (/dev/stdout, a pipe) is written to, not replaced.
    """

    def __init__(self, path: Path, option: str) -> None:
        self._path, self._option = path, option
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; give the path of a file")
        with option_errors(option, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if path.is_file() or not path.exists():  # what access() says is not all that can be wrong
                temporary = self._temporary(path.resolve())
                _remove_left(path.resolve())
                temporary.touch()
                temporary.unlink(missing_ok=True)

    def replace(self, content: bytes) -> None:
        """Make ``content`` the whole file, or leave the file as it was."""
        if self._is_special():
            with option_errors(self._option, self._path):
                self._path.write_bytes(content)
            return
        with self.written() as path:
            path.write_bytes(content)

    @contextmanager
    def written(self) -> Iterator[Path]:
        """Yield a path to write to; what is there replaces the file, unless the block raises."""
        if self._is_special():
            raise ConfigError(f"{self._option} {self._path} is no regular file; give another path")
        target = self._path.resolve()
        temporary = self._temporary(target)
        try:
            with option_errors(self._option, self._path):
                yield temporary
                os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _is_special(self) -> bool:
        return self._path.exists() and not self._path.is_file()

    @staticmethod
    def _temporary(target: Path) -> Path:
        # Ranks of one training check the same path at the same time, and two commands may write to it.
        return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _remove_left(target: Path) -> None:
    """Remove what processes that were killed have left beside ``target``. A process of another machine, which
    shares the folder, may be writing what changed less than a minute ago."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        number = left.name.removeprefix(f".{target.name}.").removesuffix(".tmp")
        if number.isdecimal() and not _runs(int(number)):
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()


def _runs(process: int) -> bool:
    """Return whether a process of this machine has this number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


class JsonFile(ResultFile):
    """A result file of one JSON object."""

    def __init__(self, path: Path, option: str = "--json") -> None:
        super().__init__(path, option)

    def write(self, content: dict[str, Any]) -> None:
        self.replace((json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def option_errors(option: str, path: Path) -> Iterator[None]:
    """Turn an error of the system at the path of an option into a ``ConfigError`` that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; give another path") from error


def machine() -> dict[str, Any]:
    """Describe the machine that gave a figure: processor, usable cores, memory, versions, date (UTC)."""
    import torch

    import tierstore

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tierstore": tierstore.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.machine()
