"""Exceptions like those of signal handlers: at any line that the main thread runs of this project."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal

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
        # Python 3.11 holds no reference of its own to a tracer that it calls: where the tracer is taken out
        # meanwhile, such as by the garbage collector's end of an older ``on``, the call would go elsewhere.
        self._tracer = self._call

    @property
    def came(self) -> bool:
        """Whether the line was reached: Python drops what a finaliser or a weak callback raises."""
        return self.lines >= self.at

    @contextmanager
    def on(self) -> Iterator[None]:
        assert threading.current_thread() is threading.main_thread()
        before = sys.gettrace()
        if self.lines < self.at:  # else nothing comes any more
            sys.settrace(self._tracer)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not _is_watched(name):
            return None
        seen: set[int] = set()

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event != "line":
                return line
            number = frame.f_lineno
            kind = _kind(name, number)
            if kind != "any":
                # A ``with`` is met again where it ends: no signal comes between that and the end itself.
                if kind == "no signal" or number in seen:
                    return line
                seen.add(number)
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.where = f"{name}:{number}"
                if self.handler is None:
                    raise Interrupted(self.where)
                self.handler()
            return line

        return line


@functools.cache
def _is_watched(file: str) -> bool:
    return "/tests/" not in file and any(part in file for part in WATCHED)


@functools.cache
def _kind(file: str, number: int) -> Literal["any", "with", "no signal"]:
    """Return what a line is; the cache is for the tracer, which asks at every line that runs."""
    text = linecache.getline(file, number)
    # The instruction of ``try:`` does nothing, not even look for signals, and stands outside of the
    # handlers around it: what is raised there skips the ends of ``with`` statements.
    if text.strip() == "try:" or "# no signal comes before this" in text:
        return "no signal"
    return "with" if text.lstrip().startswith("with ") else "any"


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
