"""Lookups of batches as they are made from what the loader gives: checked and deduplicated.

Where processors are many, a thread of its own makes them while the worker plans earlier batches: both have
steps that one thread makes alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tierstore import _core
from tierstore.modules.ahead import Content, content_of
from tierstore.modules.parts import Lookup
from tierstore.pipeline.learning import Call
from tierstore.pipeline.planned import Planned
from tierstore.pipeline.processors import give_way
from tierstore.threads import Thread

MANY_THREADS = 4
"""From so many threads of the kernels on, lookups are made beside the worker."""


class Stopped(Exception):
    """The pass ended before the lookup was made."""


class Made:
    """What becomes of one call of a batch: the call's arguments, its inputs, their content from before the
    lookup was made, their form, and the lookup."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.args: tuple[Any, ...] | None = None
        self.kwargs: dict[str, Any] = {}
        self.inputs: Sequence[Tensor] = ()
        self.form: object = None
        self.content: Content = None
        self.lookup: Lookup | None = None

    def arguments_of(self, batch: Any) -> None:
        """Find the arguments of the call in a batch. Raises what the batch's structure makes it raise."""
        self.args, self.kwargs = self._call.arguments(batch)
        self.inputs = self._call.module.lookup_inputs(*self.args, **self.kwargs)
        self.form = self._call.module.lookup_form(self.args, self.kwargs)

    def lookup_of(self, batch: Any) -> None:
        """Make the lookup. Raises what the batch's structure and its ids make it raise."""
        self.arguments_of(batch)
        assert self.args is not None
        self.content = content_of(self.inputs)  # before the ids are read, so that changes are noticed
        module: Any = self._call.module
        self.lookup = module.make_lookup(*self.args, **self.kwargs)


class MadeBeside(Made):
    """A call of a batch of which the :class:`Maker` makes the lookup; who wants it waits."""

    def __init__(self, call: Call, planned: Planned) -> None:
        super().__init__(call)
        self._planned = planned
        self._done = threading.Event()
        self._error: BaseException | None = None

    def make(self) -> None:
        """Make the lookup in the maker's thread."""
        try:
            with self._planned.on_streams():
                super().lookup_of(self._planned.batch)
        except BaseException as error:  # who wants the lookup raises it
            self._error = error
        self._done.set()

    def give_up(self) -> None:
        """Let nobody wait any more: the lookup will not be made."""
        self._error = Stopped()
        self._done.set()

    def lookup_of(self, batch: Any) -> None:
        """Wait for the lookup. Raises what making it has raised, or ``Stopped``."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Maker:
    """A thread that makes the lookups of batches in the order in which the loader gives them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[MadeBeside] = deque()
        self._is_stopping = False
        self._thread: Thread | None = None

    @classmethod
    def beside(cls) -> Maker | None:
        """Return a maker where the kernels may use many threads, else None."""
        return cls() if _core.num_threads() >= MANY_THREADS else None

    def begin(self, planned: Planned, calls: Sequence[Call]) -> None:
        """Let the lookups of a batch be made, except those that take an exchange between ranks."""
        if planned.is_end or not self._has_thread():
            return
        own = {n: MadeBeside(call, planned) for n, call in enumerate(calls) if not call.module.collective}
        with self._changed:
            if self._is_stopping:
                return
            self._waiting += own.values()
            planned.made.update(own)
            self._changed.notify()

    def _has_thread(self) -> bool:
        if self._thread is None and not self._is_stopping:
            thread = Thread(target=self._work, name="tierstore-lookups", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system refuses threads: the worker makes the lookups
                self._is_stopping = True
                return False
            self._thread = thread
        return self._thread is not None

    def stop(self) -> None:
        """Let the thread end after the lookup that it makes, and nobody wait for others."""
        with self._changed:
            self._is_stopping = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for made in waiting:
            made.give_up()

    def end(self) -> None:
        """Stop, and wait for the thread's end: one that comes back from native code while the interpreter
        ends would abort the process."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopping)
                if self._is_stopping:
                    return
                made = self._waiting.popleft()
            made.make()
            del made  # the batch is the training thread's
