"""Where a loader is in the eyes of the training, which is behind the batches that were pulled ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from tierstore.errors import ConfigError, InputError

Batch = TypeVar("Batch")


class Prefetched(Iterator[Batch], Generic[Batch]):
    """The batches of a loader, which may be pulled ahead, and the position of those that were handed out.

    ``run`` makes the iterator over the pulled batches; it must keep their order and number.
    """

    def __init__(self, loader: Iterable[Batch], run: Callable[[Iterator[Batch]], Iterator[Batch]]) -> None:
        self._loader = loader
        self._run = run
        self._behind: deque[Any] = deque()  # states of the loader after each batch that was pulled ahead
        self._batches: Iterator[Batch] | None = None
        self._used = 0
        self._state: Any = None
        self._skip = 0

    def __iter__(self) -> Prefetched[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._run(_pulled(self._loader, self._skip, self._behind))
        batch = next(self._batches)
        self._state = self._behind.popleft()
        self._used += 1
        return batch

    def close(self) -> None:
        """Ends the prefetch. Calling it again does nothing."""
        if self._batches is None:
            self._batches = iter(())
        close: Callable[[], None] | None = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch handed out last, whatever was pulled ahead of it: ``batches``, and the
        loader's own ``state_dict()`` if it has one."""
        return {"batches": self._used, "loader": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position: the loader does, if it has ``load_state_dict``, else its first batches are
        pulled and dropped. ``ConfigError`` once batches were handed out."""
        if self._batches is not None:
            raise ConfigError("the prefetch has begun; restore its position before its first batch")
        if not isinstance(state.get("batches"), int):
            raise InputError(f"this is not the position of a prefetch: {state!r}")
        self._used, self._state = state["batches"], state["loader"]
        if self._state is not None:
            load: Any = getattr(self._loader, "load_state_dict", None)
            if load is None:
                raise ConfigError(
                    "the position is that of a loader with a state, and a "
                    f"{type(self._loader).__name__} has none"
                )
            load(self._state)
        else:
            self._skip = self._used


def _pulled(loader: Iterable[Batch], skip: int, states: deque[Any]) -> Iterator[Batch]:
    """The loader's batches after the first ``skip``, and what its state is after each of them."""
    state: Callable[[], Any] | None = getattr(loader, "state_dict", None)
    for number, batch in enumerate(loader):
        if number >= skip:
            states.append(None if state is None else state())
            yield batch
