"""Lets Ctrl-C wait while torch is imported: an exception that meets torch's native code there would abort."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class WholeImport(MetaPathFinder):
    """Finds the module ``name`` as the other finders do; Ctrl-C waits until it is imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_whole, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _whole(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    with _interrupts_later():
        execute(module)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # Python runs no handlers here
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
