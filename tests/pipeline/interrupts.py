"""Exceptions like those of signal handlers: at any line that the main thread runs of this project."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tierstore import EmbeddingBagCollection, KeyedJaggedTensor

WATCHED = ("/tierstore/", "/threading.py", "/contextlib.py", "/weakref.py")


class Interrupted(BaseException):
    """What the signal handler raises."""


class Interrupter:
    """Raises at the n-th line, or calls ``handler`` there."""

    def __init__(self, at: int, handler: Callable[[], None] | None = None) -> None:
        self.at = at
        self.handler = handler
        self.lines = 0
        self.where = ""

    @contextmanager
    def on(self) -> Iterator[None]:
        assert threading.current_thread() is threading.main_thread()
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "/tests/" in name or not any(part in name for part in WATCHED):
            return None
        seen: set[int] = set()

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event != "line":
                return line
            # A line is met again where its ``with`` ends: no signal comes between that and the end itself.
            again = frame.f_lineno in seen and _text(frame).lstrip().startswith("with ")
            seen.add(frame.f_lineno)
            # The instruction of ``try:`` does nothing, not even look for signals, and stands outside of the
            # handlers around it: what is raised there skips the ends of ``with`` statements.
            begins = _text(frame).strip() == "try:"
            if again or begins or "# no signal comes before this" in _text(frame):
                return line
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.where = f"{name}:{frame.f_lineno}"
                if self.handler is None:
                    raise Interrupted(self.where)
                self.handler()
            return line

        return line


def _text(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


class Steps:
    """Steps of a module, and all of its rows as they are after so many undisturbed ones."""

    def __init__(
        self,
        build: Callable[[], EmbeddingBagCollection],
        batch: Callable[[int], KeyedJaggedTensor],
        rows: int,
        steps: int,
    ) -> None:
        self._build, self._batch, self._ids, self._steps = build, batch, torch.arange(rows), steps

    def step(self, module: EmbeddingBagCollection, number: int, collect: Callable = nullcontext) -> None:
        with collect(module):
            module(self._batch(number)).values().sin().sum().backward()

    def is_state(self, module: EmbeddingBagCollection, number: int) -> bool:
        """Whether the rows of ``module`` are those after ``number`` steps."""
        return all(map(torch.equal, self._everything(module), self._states[number]))

    @functools.cached_property
    def _states(self) -> list[list[Tensor]]:
        with self._build() as module:
            found = [self._everything(module)]
            for number in range(self._steps):
                self.step(module, number)
                found.append(self._everything(module))
        return found

    def _everything(self, module: EmbeddingBagCollection) -> list[Tensor]:
        found = []
        for name in module.table_names():
            found += [module.rows(self._ids, name), *module.optimizer_rows(self._ids, name).values()]
        return found
