"""One optimizer step of the rows of lookups, which no signal handler cuts in two.

All that may fail or take long comes first. What changes rows and counts is then a list of calls of native
functions, between which Python runs no handler: an exception of a handler (Ctrl-C) meets rows of all row
layouts and modules, and the counts of updates, as before the step or as after it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore._core import OptimizerStep, UpdateArgs, UpdateRounding
from tierstore.cache.device import Device, DeviceRows, ReadyUpdates
from tierstore.cache.pinned_rows import TierRows
from tierstore.errors import GradientError, TierStoreError
from tierstore.keys import split
from tierstore.modules.gradient_hooks import GradientHook, hooked_gradients
from tierstore.modules.parts import Lookup, Part
from tierstore.modules.row_shares import Csr, TableStep, shares_of, step_of
from tierstore.optim.fused import FusedOptimizer

Rest: TypeAlias = NDArray[np.int32]
"""Unique rows that an update left alone."""
Wrong: TypeAlias = "list[tuple[Part, slice | NDArray[np.intp], Rest]]"
"""Rows that were left alone, among the unique rows of a share of a part."""

_NOW = partial(time.perf_counter)
Entry = TypeVar("Entry")


class Gradients(ABC):
    """The gradients of a lookup's outputs, and what else the kernels need to compute the rows' gradients."""

    @abstractmethod
    def prepared(
        self, index: int, part: Any, rows: DeviceRows, args: UpdateArgs, rounding: UpdateRounding | None
    ) -> partial[Rest]:
        """Return a call that updates the rows of part number ``index``, and returns those (int32, in
        ``args.slots``) that were left alone. ``rounding``: of the rows."""

    @abstractmethod
    def multiply(self, factor: float) -> None:
        """Multiply the gradients, in place."""

    def update(
        self, index: int, part: Part, rows: DeviceRows, args: UpdateArgs, rounding: UpdateRounding | None
    ) -> Rest:
        """Make the call that :meth:`prepared` returns."""
        call = self.prepared(index, part, rows, args, rounding)
        with part.group.stats.stage("compute_seconds"):
            return call()


class Keeps(Protocol):
    """An object that keeps gradients and updates rows later."""

    unscales: bool
    """Whether the update under way divides gradients by the scale of a GradScaler."""

    def keep(self, module: Updates, lookup: Lookup, gradients: Gradients) -> None:
        """Take the gradients of one backward pass; copy tensors that other code may change."""
        ...


class Updates(Protocol):
    """The part of a module that the backward pass uses."""

    fused_optimizer: FusedOptimizer
    check_gradients: bool
    accumulation: Keeps | None
    """Keeps gradients for a later update; None: each backward pass updates the rows."""

    def next_update(self) -> tuple[Sequence[TableStep], Sequence[partial[None]]]:
        """Return the optimizer steps of an update, and native calls that count it."""
        ...

    def check_update(self) -> None:
        """Raise ConfigError if an update now would be wrong."""
        ...

    def gradient_hooks(self) -> Mapping[int, tuple[str, Sequence[GradientHook]]]:
        """Return the names and hooks of tables that have hooks, by their numbers in the engine."""
        ...

    def frozen_tables(self) -> list[int]:
        """Return the tables whose rows stay as they are."""
        ...

    def mean_squares(
        self, parts: Sequence[Part], squares_of: Callable[[int], NDArray[np.float32]]
    ) -> Sequence[NDArray[np.float32] | None]:
        """Return, by part, the mean square of each unique row's gradient over all columns of its table; None
        for parts whose rows have all columns. ``squares_of(part)``: the sums of squares over the columns that
        are here."""
        ...

    def table_name(self, table: int) -> str: ...

    def report_gradients(self, error: GradientError | None) -> None:
        """Raise ``error``, which the update had, or handle it. Called at every update."""
        ...


def update_rows(module: Updates, parts: Sequence[Part], gradients: Gradients) -> None:
    """Make one optimizer step for the rows of every part, and release the rows. Threads that train one module
    make their steps one after the other, so that each step has a number of its own, and none is lost."""
    for part in parts:
        part.group.check_process()  # in a forked child a thread that is not there may hold the lock
    with module.fused_optimizer.updating:
        make_updates([prepared_update(module, parts, gradients)])


def prepared_update(module: Updates, parts: Sequence[Part], gradients: Gradients) -> PreparedUpdate:
    """Return one optimizer step for the rows of every part, which :func:`make_updates` makes. No row changes
    before."""
    for part in parts:
        part.group.check_open()  # before the update is counted
    frozen = {*module.frozen_tables(), *(table for part in parts for table in part.frozen)}
    hooks = {table: hook for table, hook in module.gradient_hooks().items() if table not in frozen}
    if hooks:
        module.check_update()
    hooked = hooked_gradients(parts, gradients, hooks) if hooks else [[] for _ in parts]
    steps, counting = module.next_update()
    pinned_rows = [_repin(part) for part in parts]
    for part, pinned in zip(parts, pinned_rows, strict=True):
        part.group.mark_updated(pinned)
    skipped = [*frozen, *hooks]

    def squares_of(index: int) -> NDArray[np.float32]:
        part, pinned = parts[index], pinned_rows[index]
        squares = np.zeros(len(part.batch.unique), np.float32)
        for share in shares_of(part, pinned.slots, pinned.csr, steps):
            own = squares[share.at]
            args = update_args(part, share.slots, share.csr, share.step, squares=own)
            gradients.update(index, part, pinned.device_rows, args, share.rounding)
            squares[share.at] = own
        return squares

    changes = [_Change(part, pinned) for part, pinned in zip(parts, pinned_rows, strict=True)]
    for index, means in enumerate(module.mean_squares(parts, squares_of)):
        part, pinned, change = parts[index], pinned_rows[index], changes[index]
        csr = trained_csr(part, skipped) if skipped else pinned.csr
        for share in shares_of(part, pinned.slots, csr, steps):
            # a row whose norm is clipped is whole, and its mean square is that of the clipped gradient
            own = None if means is None or np.isfinite(share.step.clip_norm) else means[share.at]
            args = update_args(part, share.slots, share.csr, share.step, module.check_gradients, means=own)
            change.add(share.at, gradients.prepared(index, part, pinned.device_rows, args, share.rounding))
        for one in hooked[index]:
            step, checks = step_of(one.table, steps), module.check_gradients
            args = update_args(part, pinned.slots[one.at], one.csr, step, checks)
            change.add(one.at, one.prepared(part, pinned.device_rows, args))
    return PreparedUpdate(module, changes, counting, (gradients, hooked))


class _Change:
    """The calls that update the rows of one part, and what they leave alone."""

    def __init__(self, part: Part, pinned: TierRows) -> None:
        self.part, self.pinned = part, pinned
        self.places: list[slice | NDArray[np.intp]] = []
        self.calls: list[partial[Rest]] = []

    def add(self, at: slice | NDArray[np.intp], call: partial[Rest]) -> None:
        """Take a call that updates the unique rows ``at``."""
        self.places.append(at)
        self.calls.append(call)

    def finish(self, left: Sequence[Rest], seconds: float) -> Wrong:
        """Release the rows, of which the calls have left some alone; return these."""
        self.part.group.stats.counters.compute_seconds += seconds
        self.part.group.check_open()
        self.pinned.release()
        return [(self.part, at, rows) for at, rows in zip(self.places, left, strict=True)]


Ready: TypeAlias = "list[tuple[list[_Change], ReadyUpdates]]"
"""The changes of each device, and what makes them."""


@dataclass(frozen=True)
class PreparedUpdate:
    """One optimizer step of a module's rows, of which the native calls are left to make."""

    module: Updates
    changes: Sequence[_Change]
    counting: Sequence[partial[None]]
    kept: object
    """What has the memory that the calls read: they know its addresses alone."""


def make_updates(updates: Sequence[PreparedUpdate]) -> None:
    """Make the optimizer steps of some modules, and release their rows.

    All calls are made one after the other. Python runs no signal handler between two of them, since none is a
    call of a function in Python. An error of one module's gradients is raised when all modules have reported
    theirs: ranks report together."""
    wrong = iter(_make([change for update in updates for change in update.changes], updates))
    errors = []
    for update in updates:
        try:
            _report_wrong(update.module, [one for _ in update.changes for one in next(wrong)])
        except TierStoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _make(changes: Sequence[_Change], updates: Sequence[PreparedUpdate]) -> list[Wrong]:
    """Make all calls, release the rows, and return what each change has left alone."""
    ready, made = _made(_by_device(changes), [], changes, updates)
    timed: dict[_Change, list[Any]] = {
        change: list(islice(made, len(change.calls) + 2)) for change in changes
    }
    left = _divided(
        (own, one.unchanged([result for change in own for result in timed[change][1:-1]]))
        for own, one in ready
    )
    return [change.finish(left[change], timed[change][-1] - timed[change][0]) for change in changes]


def _made(
    devices: Sequence[tuple[Device, list[_Change]]],
    ready: Ready,
    changes: Sequence[_Change],
    updates: Sequence[PreparedUpdate],
) -> tuple[Ready, Iterator[object]]:
    """Make the updates of all ``devices`` ready, one inside of the other, then make all calls; return what is
    ready, and what the calls return."""
    if devices:
        (device, own), *rest = devices
        with device.ready_updates([call for one in own for call in one.calls]) as updating:
            return _made(rest, [*ready, (own, updating)], changes, updates)
    native = _divided((own, one.calls) for own, one in ready)
    calls: list[Any] = []
    for change in changes:
        calls += [_NOW, *native[change], _NOW]
    for update in updates:
        for change in update.changes:  # a flush since the rows' first mark has seen them as they were
            calls += change.part.group.marking(change.pinned)
        calls += update.counting
    return ready, iter(list(map(partial.__call__, calls)))


def _by_device(changes: Sequence[_Change]) -> list[tuple[Device, list[_Change]]]:
    """Return the changes of each device, in their order."""
    found: list[tuple[Device, list[_Change]]] = []
    for change in changes:
        own = next((own for device, own in found if device.takes(change.pinned.device_rows)), None)
        if own is None:
            found.append((change.part.group.device, own := []))
        own.append(change)
    return found


def _divided(pairs: Iterable[tuple[Sequence[_Change], Sequence[Entry]]]) -> dict[_Change, list[Entry]]:
    """Divide a list of one entry for each call of some changes among these changes."""
    found: dict[_Change, list[Entry]] = {}
    for changes, entries in pairs:
        rest = iter(entries)
        found |= {change: list(islice(rest, len(change.calls))) for change in changes}
    return found


def _repin(part: Part) -> TierRows:
    """Return the part's rows, pinned again if a former backward pass (``retain_graph``) has released them."""
    assert isinstance(part.rows, TierRows)
    if not part.rows.held:
        part.rows = part.group.lookup(part.batch)
    return part.rows


def update_args(
    part: Part,
    slots: NDArray[np.int32],
    csr: Csr | None,
    step: OptimizerStep,
    check_finite: bool = False,
    *,
    squares: NDArray[np.float32] | None = None,
    means: NDArray[np.float32] | None = None,
) -> UpdateArgs:
    """Return the arguments for one optimizer step of the part's unique rows at ``slots``."""
    assert csr is not None
    part.group.check_process()
    return UpdateArgs(
        dim=part.group.layout.dim, slots=slots, csr_start=csr[0], csr_positions=csr[1],
        step=step, check_finite=check_finite, squares=squares, means=means,
    )  # fmt: skip


def trained_csr(part: Part, frozen: Sequence[int]) -> Csr:
    """Return the positions of every unique row; rows of frozen tables have none, and so are not updated."""
    stays = np.isin(split(part.batch.unique)[0], frozen)
    inverse = part.batch.inverse
    skipped = (inverse < 0) | (stays[np.maximum(inverse, 0)] if len(stays) else True)
    return _core.build_csr(np.where(skipped, -1, inverse).astype(np.int32), len(stays))


def _report_wrong(module: Updates, wrong: Wrong) -> None:
    """Report rows that were left alone: ``wrong`` has them among the unique rows of a share of a part."""
    found = []
    for part, at, unique in wrong:
        if len(unique):
            tables, ids = split(part.batch.unique[at][unique])
            found += [f"{module.table_name(int(t))} id {i}" for t, i in zip(tables[:8], ids[:8], strict=True)]
    if not found:
        module.report_gradients(None)
        return
    total = sum(len(unique) for *_, unique in wrong)
    error = GradientError(
        f"the gradient of {total} row(s) is NaN or infinite; they were not updated, all others were: "
        f"{', '.join(found[:8])}{' ...' if total > 8 else ''}. Look at the loss and the learning rate."
    )
    module.report_gradients(error)
