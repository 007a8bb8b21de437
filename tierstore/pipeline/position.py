"""A loader's position as the training sees it, which is behind the batches that were pulled ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from weakref import ref

from tierstore.errors import ConfigError, InputError

Batch = TypeVar("Batch")
Run = Callable[[Iterator[Batch]], Iterator[Batch]]
_STATELESS = (AttributeError, NotImplementedError)  # raised by a ``state_dict`` that is not implemented


class _Position:
    """The batches of the newest pass that were handed out, and the batches that were pulled ahead."""

    def __init__(self) -> None:
        self.passes = 0
        self.used = 0
        self.state: Any = None
        self.behind: deque[tuple[Any, Any]] = deque()
        """Batches that were pulled and not handed out, each with the loader's state after it."""


class _Pass(Iterator[Batch]):
    """One pass over the loader; dropping it ends its prefetch."""

    def __init__(self, position: _Position, batches: Iterator[Batch]) -> None:
        position.passes += 1
        self._position = position
        self._number = position.passes
        self._batches = batches
        self.over = False

    def __next__(self) -> Batch:
        position = self._position
        if self._number != position.passes and not self.over:
            raise ConfigError(
                "another pass over this prefetch has begun, which has ended this one; "
                "give loops that run at the same time a prefetch each"
            )
        try:
            batch = next(self._batches)
        except BaseException:
            self.over = True
            raise
        _, position.state = position.behind.popleft()
        position.used += 1
        return batch

    def end_prefetch(self) -> None:
        close: Callable[[], None] | None = getattr(self._batches, "close", None)
        if close is not None:
            close()


class Prefetched(Iterator[Batch], Generic[Batch]):
    """The batches of a loader, which may be pulled ahead, and the position of the batch handed out last.

    Every ``for`` loop is a new pass over the loader, as over a ``DataLoader``: from its beginning after a
    ``break``, and for each epoch. A loader that is an iterator itself goes on where the former pass ended, as
    without prefetch. A new pass ends the one before it, whose iterator raises ``ConfigError`` from then on.
    ``next()`` of this object begins a pass too, and a ``for`` loop goes on with that pass.

    ``run`` makes the iterator over the pulled batches; it must keep their order and number.
    """

    def __init__(self, loader: Iterable[Batch], run: Run[Batch]) -> None:
        self._loader = loader
        self._run = run
        self._position = _Position()
        self._newest: Callable[[], _Pass[Batch] | None] = lambda: None
        self._own: _Pass[Batch] | None = None  # the pass of next()
        self._closed = False
        self._restored = False
        self._skip = 0

    def __iter__(self) -> Iterator[Batch]:
        if self._own is not None and not self._own.over:
            return self
        self._own = None
        return self._begin()

    def __next__(self) -> Batch:
        if self._own is None:
            if self._closed:
                raise StopIteration
            self._own = self._begin()
        return next(self._own)

    def __len__(self) -> int:
        """Return the number of batches of the loader, if it knows."""
        return len(self._loader)  # type: ignore[arg-type]

    def _begin(self) -> _Pass[Batch]:
        before = self._newest()
        if before is not None:
            before.end_prefetch()
        position, skip = self._position, self._skip
        left = list(position.behind) if isinstance(self._loader, Iterator) else []
        position.behind.clear()
        if not self._restored:
            position.used, position.state = 0, None
        self._closed, self._restored, self._skip = False, False, 0
        pulled = _pulled(left, self._loader, skip, position.behind)
        newest = _Pass(position, self._run(pulled))
        self._newest = ref(newest)
        return newest

    def close(self) -> None:
        """End the prefetch. Calling it again does nothing; iterating again begins a new pass."""
        self._closed = True
        newest = self._newest()
        if newest is not None:
            newest.over = True
            newest.end_prefetch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch handed out last, without batches pulled ahead: ``batches``, and
        the loader's own ``state_dict()`` if it has one. Both entries are of the newest pass."""
        return {"batches": self._position.used, "loader": self._position.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass at a position: by the loader's ``load_state_dict``, if it has one, else by
        dropping its first batches. ``ConfigError`` in the middle of a pass."""
        newest = self._newest()
        if newest is not None and not newest.over:
            raise ConfigError("the prefetch has begun; restore its position before its first batch")
        if not isinstance(state.get("batches"), int):
            raise InputError(f"this is not the position of a prefetch: {state!r}")
        used, of_loader = state["batches"], state["loader"]
        if of_loader is not None:
            load: Any = getattr(self._loader, "load_state_dict", None)
            if load is None:
                raise ConfigError(
                    "the position is that of a loader with a state, and a "
                    f"{type(self._loader).__name__} has none"
                )
            load(of_loader)
        else:
            self._skip = used
        self._position.used, self._position.state, self._restored = used, of_loader, True
        self._position.behind.clear()
        self._closed, self._own = False, None


def _pulled(
    left: list[tuple[Any, Any]], loader: Iterable[Batch], skip: int, behind: deque[tuple[Any, Any]]
) -> Iterator[Batch]:
    """Yield the batches that a former pass pulled and did not use, then the loader's batches after the first
    ``skip``; ``behind`` gets each batch, with the loader's state after it."""
    state: Callable[[], Any] | None = getattr(loader, "state_dict", None)
    for item in left:
        behind.append(item)
        yield item[0]
    for number, batch in enumerate(loader):
        if number < skip:
            continue
        after = None
        if state is not None:
            try:
                after = state()
            except _STATELESS:
                state = None
        behind.append((batch, after))
        yield batch
