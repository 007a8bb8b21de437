"""``tierstore.prefetch``: the loader's batches, in order, while the rows of coming batches are fetched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn

from cache_policies.windows import FIRST_ROWS
from tierstore.config import MAX_DEPTH, is_integer
from tierstore.errors import ConfigError, RankError
from tierstore.modules.base import TieredModule
from tierstore.pipeline.copies import Unchanged, copies_to
from tierstore.pipeline.host_ids import HostIds
from tierstore.pipeline.learning import Call, Recorder
from tierstore.pipeline.planned import Planned
from tierstore.pipeline.position import Prefetched
from tierstore.pipeline.session import Session
from tierstore.rounds import MAX_WINDOW

logger = logging.getLogger("tierstore")

Batch = TypeVar("Batch")
Inputs = Mapping["str | nn.Module", Callable[[Any], Any]]

AUTO_DEPTH = 2
_FULL, _ENOUGH, _TOO_FEW = range(3)  # what the batches before the first plan are

_warned: WeakSet[nn.Module] = WeakSet()
"""Modules that a warning has named as not prefetched."""


def prefetch(
    loader: Iterable[Batch],
    model: nn.Module | Sequence[nn.Module],
    *,
    depth: int | str | None = None,
    window: int | str | None = None,
    inputs: Inputs | None = None,
    device: torch.device | str | None = None,
) -> Prefetched[Batch]:
    """Yield the batches of ``loader`` in order while a worker thread brings the rows of the next batches into
    memory.

    ``depth``: batches that are planned and fetched ahead (0: none); ``window``: batches whose ids are known
    ahead; the ``lookahead`` policy looks at these. "auto" (the default, from ``TierConfig``) chooses the
    depth from the first batches, and the window for every plan from the batches that are known then, so that
    a run is reproducible. ``inputs`` maps a module (or its name in ``model``)
    to a function from a batch to the arguments of its forward call; without it, they are learned from the
    first batch, which is then not prefetched. Modules that cannot be learned run on demand, as do batches for
    which such a function raises an error, and a warning says so once. ``device``: a GPU to which the next
    batch is copied while one is in use, without its ids (see ``PrefetchPipeline``); batches stay where they
    are if it is None or the CPU.

    Iterate over the result as over a ``DataLoader``, once per epoch: each ``for`` loop is a new pass and ends
    the pass before it. A loop may be left at any time; ``close()``, or dropping its iterator, ends the
    prefetch. ``state_dict()`` is the position of the batches handed out (not of batches pulled ahead), for
    checkpoints; after ``load_state_dict()`` the next pass goes on from there.

    Raises ``ConfigError`` for a wrong depth or window, or a model without tiered modules.
    """
    copies = copies_to(None if device is None else torch.device(device))
    return prefetched(loader, model, depth, window, inputs, copies)


def prefetched(
    loader: Iterable[Batch],
    model: nn.Module | Sequence[nn.Module],
    depth: int | str | None,
    window: int | str | None,
    inputs: Inputs | None,
    copies: Unchanged,
) -> Prefetched[Batch]:
    """Return what :func:`prefetch` returns. ``copies``: brings batches to the device where they are used."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    modules = _tiered_modules(models)
    config = modules[0].engine.config
    depth = _number("depth", config.depth if depth is None else depth, MAX_DEPTH)
    window = _number("window", config.window if window is None else window, 1 << 20)
    given = _given_calls(models, inputs) if inputs is not None else None
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):  # as iter() takes
        raise TypeError(f"a {type(loader).__name__} is no iterable of batches; give a DataLoader or a list")
    return Prefetched(loader, lambda batches: _run(batches, modules, depth, window, given, copies))


def _number(name: str, value: int | str, maximum: int) -> int | None:
    if value == "auto":
        return None
    if not is_integer(value, 0, maximum):
        raise ConfigError(f'{name} is {value!r}; it must be "auto" or an integer from 0 to {maximum}')
    return value


def _tiered_modules(models: Sequence[nn.Module]) -> list[TieredModule]:
    found = {id(m): m for model in models for m in model.modules() if isinstance(m, TieredModule)}
    if not found:
        raise ConfigError(
            "the model has no tiered module; build it with tierstore's modules, or call "
            "tierstore.offload(model, ...)"
        )
    for module in found.values():
        if module.engine.waits:
            module.engine.need_rows()
    return list(found.values())


def _given_calls(models: Sequence[nn.Module], inputs: Inputs) -> list[Call]:
    by_name = {name: module for model in models for name, module in model.named_modules()}
    calls = []
    for key, function in inputs.items():
        module = by_name.get(key) if isinstance(key, str) else key
        if not isinstance(module, TieredModule):
            names = [name for name, m in by_name.items() if isinstance(m, TieredModule)]
            raise ConfigError(f"inputs: {key!r} is not a tiered module of the model; give one of {names}")

        def arguments(batch: Any, function: Callable[[Any], Any] = function) -> Any:
            value = function(batch)
            return (value if isinstance(value, tuple) else (value,)), {}

        calls.append(Call(module, arguments, is_given=True))
    return calls


class _Tables:
    """The engines that a pass prefetches, and its session.

    An interrupt may keep the pass from ending the session; dropping this object then ends it.
    """

    session: Session | None = None  # also of an object whose making was interrupted

    def __init__(self, modules: list[TieredModule]) -> None:
        self.engines = []
        for engine in {id(module.engine): module.engine for module in modules}.values():
            if _taken.setdefault(id(engine), self) is self:
                self.engines.append(engine)
            else:
                logger.info("another prefetch runs on these tables; this one looks their rows up on demand")

    def has(self, module: TieredModule) -> bool:
        return any(engine is module.engine for engine in self.engines)

    def begin(self, calls: list[Call]) -> Session:
        self.session = Session(self.engines, calls)
        self.session.begin()
        return self.session

    def end(self) -> None:
        try:
            if self.session is not None:
                self.session.close()
        finally:
            for engine in self.engines:
                if _taken.get(id(engine)) is self:
                    _taken.pop(id(engine), None)

    def __del__(self) -> None:
        if self.session is not None:
            self.session.close()


_taken: WeakValueDictionary[int, _Tables] = WeakValueDictionary()
"""By id(engine), the prefetch of its tables; other prefetches look their rows up on demand."""


def _run(
    loader: Iterator[Batch],
    modules: list[TieredModule],
    depth: int | None,
    window: int | None,
    given: list[Call] | None,
    copies: Unchanged,
) -> Iterator[Batch]:
    tables = _Tables(modules)
    try:
        recorder = Recorder([module for module in modules if tables.has(module)])
        if given is None:
            try:
                yield from _learn(loader, recorder, copies)
            finally:
                recorder.stop()
            calls = recorder.calls
        else:
            calls = [call for call in given if tables.has(call.module)]
        if calls:
            yield from _ahead(loader, tables.begin(calls), depth, window, _Bringing(copies, recorder))
        else:
            for batch in loader:
                yield copies.finish(batch, HostIds(recorder.read_of(batch)))
    finally:
        copies.forget()
        tables.end()


def _learn(loader: Iterator[Batch], recorder: Recorder, copies: Unchanged) -> Iterator[Batch]:
    """Yield batches until a batch has shown what each module gets (a batch may be used without training)."""
    for batch in loader:
        recorder.start()
        made = copies.finish(batch, HostIds(recorder.read_of(batch)))
        yield made
        if recorder.learn(made):
            break
    for module in recorder.unknown:
        if module in _warned:
            continue
        _warned.add(module)
        logger.warning(
            "%s (tables %s): what it looks up cannot be told from the batch, so it is not prefetched; give "
            "prefetch(..., inputs={module: function of the batch}). (said once)",
            type(module).__name__,
            ", ".join(module.table_names()),
        )


def _ahead(
    loader: Iterator[Batch], session: Session, depth: int | None, window: int | None, bringing: _Bringing
) -> Iterator[Batch]:
    failed: Exception | None = None

    def pull() -> Planned | None:
        nonlocal failed
        if session.ended:
            session.send()
            return None
        try:
            batch = next(loader)
        except StopIteration:
            return session.end(None)
        except Exception as error:  # raised where a loop without prefetch would see it
            failed = error
            return session.end(error)
        return session.add(batch)

    def next_batch() -> Planned | None:
        try:
            return session.next()
        except RankError:
            if failed is None:
                raise
            raise failed from None  # the other ranks know of it

    more = _fill(session, pull, depth, window)
    while (planned := next_batch()) is not None:
        try:
            yield bringing.brought(planned, session.following)
        finally:
            session.finish(planned)
        if more:
            session.follow(planned)
        while more and session.wants_more:
            more = pull() is not None
        session.allow()
    if failed is not None:
        raise failed


@dataclass(frozen=True)
class _Bringing:
    """How batches come to where they are used. ``recorder`` knows of lookups that are not made ahead."""

    copies: Unchanged
    recorder: Recorder

    def brought(self, planned: Planned, following: Planned | None) -> Any:
        """Return the batch where it is used, and begin to bring the one after it."""
        batch = self.copies.finish(planned.batch, self._ids(planned))
        if following is not None:
            self.copies.start(following.batch, self._ids(following))
        return batch

    def _ids(self, planned: Planned) -> HostIds:
        return HostIds([*planned.read, *self.recorder.read_of(planned.batch)])


def _fill(
    session: Session, pull: Callable[[], Planned | None], depth: int | None, window: int | None
) -> bool:
    """Pull the first window, choose automatic settings, and start the session. Return False if the loader has
    ended."""
    depth, window = _agreed(session, depth), _agreed(session, window)
    session.choose(window)
    first, more, rows, have = None, True, 0, _TOO_FEW
    while more:
        planned = pull()
        if planned is not None:
            session.wait_prepared(planned)
        if planned is None or planned.is_end or planned.error is not None:
            more = False
            break
        first = first or planned
        rows += planned.rows
        if window is not None:
            have = _FULL if session.pulled_ahead > window else _TOO_FEW
        else:
            full = session.pulled_ahead > MAX_WINDOW or planned.fills
            have = session.ranks.min_over_ranks(
                _FULL if full else _ENOUGH if rows >= FIRST_ROWS else _TOO_FEW
            )
        if have != _TOO_FEW:
            break
    chosen = max(0, session.pulled_ahead - 1) if window is None else window
    deep = session.ranks.min_over_ranks(_auto_depth(session, first)) if depth is None else depth
    session.start(deep, chosen, is_full=have == _FULL)
    logger.debug("prefetch: depth %d, window %d", deep, chosen)
    while more and session.wants_more:
        more = pull() is not None
    session.allow()
    return more


def _agreed(session: Session, number: int | None) -> int | None:
    """Return the smallest number of any rank, or None (automatic) if a rank has None: ranks that pull
    different numbers of batches ahead would wait for one another."""
    smallest = session.ranks.min_over_ranks(-1 if number is None else number)
    return None if smallest < 0 else smallest


def _auto_depth(session: Session, first: Planned | None) -> int:
    """Return how many batches fit in half of the fast tier beside the one in use, at most ``AUTO_DEPTH``."""
    fits = AUTO_DEPTH
    for group, pinned in first.lookups if first is not None else []:
        rows = max(1, len(pinned.batch.unique))
        fits = min(fits, group.fast.capacity // (2 * rows) - 1)
    return max(1, fits)
