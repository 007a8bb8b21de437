"""Hooks on the gradients of rows, by table: they run at every update, before the optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tierstore import _core
from tierstore._core import OptimizerStep, UpdateArgs
from tierstore.cache.device import ComputedRows, DeviceRows
from tierstore.errors import ConfigError, GradientError
from tierstore.keys import split
from tierstore.modules.gpu import brought
from tierstore.modules.parts import Part
from tierstore.modules.row_shares import Csr, cut_rows, places_of
from tierstore.row_format import WIDE

GradientHook: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]
"""``hook(ids, gradients)`` → gradients: int64 (n,) and float32 (n, dim), of the rows of an update."""
_TAKEN_OFF = OptimizerStep(kind=0, lr=-1.0)  # of rows of zeros this makes their gradients


def rows_of_sums(dim: int) -> ComputedRows:
    """Return the rows whose update sums the gradients of a table of ``dim`` columns, for its hooks."""
    return dim, WIDE.weights, _TAKEN_OFF.kind


class GradientHooks:
    """The hooks of a module's tables, by their names."""

    def __init__(self) -> None:
        self.of: dict[str, OrderedDict[int, GradientHook]] = {}

    def __bool__(self) -> bool:
        return any(self.of.values())

    def add(self, table: str, hook: GradientHook) -> RemovableHandle:
        """Let ``hook`` see and change the gradients of a table's rows."""
        if not callable(hook):
            raise ConfigError(f"the gradient hook of table {table!r} is {hook!r}; give hook(ids, gradients)")
        hooks = self.of.setdefault(table, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


@dataclass(frozen=True)
class Hooked:
    """``gradients`` of the unique rows ``at`` of a part, which are of ``table``, as its hooks left them, on
    the device of the part."""

    table: int
    at: slice | NDArray[np.intp]
    gradients: Tensor

    @property
    def csr(self) -> Csr:
        """The position of each row, which is its own."""
        count = len(self.gradients)
        return np.arange(count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)

    def prepared(self, part: Part, rows: DeviceRows, args: UpdateArgs) -> partial[NDArray[np.int32]]:
        """Return a call that updates the rows, and returns those that were left alone, in ``at``."""
        grad = self.gradients.data_ptr()
        return partial(rows.update_rows, args, grad, part.group.layout.dim, part.rounding(self.at))


class Reduces(Protocol):
    """The gradients of a lookup's outputs; see ``modules.row_updates.Gradients``."""

    def update(
        self, index: int, part: Part, rows: DeviceRows, args: UpdateArgs, rounding: None
    ) -> NDArray[np.int32]: ...


def hooked_gradients(
    parts: Sequence[Part], gradients: Reduces, hooks: Mapping[int, tuple[str, Sequence[GradientHook]]]
) -> list[list[Hooked]]:
    """Return, by part, the gradients of rows of tables with hooks, after these. No row changes.

    ``hooks``: names and hooks of tables by their numbers. Raises GradientError, which names the table, for
    what a hook raises, and for a result that is no gradient.
    """
    found: list[list[Hooked]] = []
    for index, part in enumerate(parts):
        tables, ids = split(part.batch.unique)
        own = []
        for number, (name, of_table) in hooks.items():
            at = places_of(tables == number)
            if at is not None:
                reduced = _reduced(index, part, gradients, at)
                chosen = torch.from_numpy(ids[at].astype(np.int64))
                left = _run(name, of_table, chosen, reduced)
                own.append(Hooked(number, at, brought(left, torch.device(part.device))))
        found.append(own)
    return found


def _reduced(index: int, part: Part, gradients: Reduces, at: slice | NDArray[np.intp]) -> Tensor:
    """Return the sums of the gradients of the unique rows ``at``: float32 (n, dim)."""
    dim, count = part.group.layout.dim, len(part.batch.unique)
    csr = _core.build_csr(part.batch.inverse, count)
    slots, csr = cut_rows(np.arange(count, dtype=np.int32), csr, at)
    slots = np.arange(len(slots), dtype=np.int32)
    zeros = np.zeros((len(slots), WIDE.row_bytes(dim, 0)), np.uint8)
    rows, out = part.group.device.load(zeros, WIDE.weights), np.empty_like(zeros)
    args = UpdateArgs(dim=dim, slots=slots, csr_start=csr[0], csr_positions=csr[1], step=_TAKEN_OFF)
    gradients.update(index, part, rows, args, None)
    rows.copy_out(slots, out)
    return torch.from_numpy(np.ascontiguousarray(out.view(np.float32)[:, :dim]))


def _run(name: str, hooks: Sequence[GradientHook], ids: Tensor, gradients: Tensor) -> Tensor:
    for hook in hooks:
        try:
            result = hook(ids, gradients)
        except Exception as error:
            raise GradientError(
                f"the gradient hook of table {name!r} raised {type(error).__name__}: {error}; no row was "
                "updated"
            ) from error
        if result is not None:
            gradients = _checked(name, result, gradients.shape)
    return gradients


def _checked(name: str, result: object, shape: torch.Size) -> Tensor:
    fits = isinstance(result, Tensor) and result.shape == shape and result.is_floating_point()
    if not fits or result.device.type != "cpu":  # type: ignore[attr-defined]
        given = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else repr(result)
        raise GradientError(
            f"the gradient hook of table {name!r} returned {given}; it must return gradients of the shape "
            f"{tuple(shape)}, floats on the CPU, or None; no row was updated"
        )
    return result.detach().to(torch.float32).contiguous()  # type: ignore[attr-defined, no-any-return]
