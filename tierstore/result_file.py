"""Files that commands write their results to: made sure of first, written at the end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError


class JsonFile:
    """A result file; made sure of before the work that it is for, and replaced whole."""

    def __init__(self, path: Path, option: str = "--json") -> None:
        self._path = path
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; give the path of a file")
        with option_errors(option, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def write(self, content: dict[str, Any]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


@contextmanager
def option_errors(option: str, path: Path) -> Iterator[None]:
    """Turns an error of the system at the path that an option gave into one that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; give another path") from error
