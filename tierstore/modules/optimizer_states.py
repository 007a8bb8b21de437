"""The optimizer state of a module's rows in the form of its fused optimizer's state dict."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tierstore.errors import ClosedError, ConfigError
from tierstore.modules.left_out import check_mark, is_large, is_mark, mark
from tierstore.modules.tables import HasWeight, id_ranges, rows_are_left_out
from tierstore.optim.fused import FusedOptimizer

LEFT_OUT = "rows"
"""Name of the mark that stands for the state of a large table."""


class HasFusedOptimizer(Protocol):
    """What the module must offer whose rows have the state."""

    fused_optimizer: FusedOptimizer

    @property
    def frozen(self) -> bool: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def set_updates(self, count: int) -> None: ...


class OptimizerStates:
    """Reads and writes what a :class:`~tierstore.optim.FusedOptimizer` shows of the rows of ``module``.

    The form is ``{weight: {"<table>.<part>": tensor}}``. The module's state dict names the weights; the
    specification names the parts, dense tensors of all rows; ``step`` is the number of updates.
    """

    def __init__(self, module: HasFusedOptimizer) -> None:
        self._module = weakref.ref(module)

    def _views(self) -> dict[str, HasWeight]:
        """Return the tables by the names of their weights."""
        module = self._module()
        if module is None:
            raise ClosedError(
                "the tables of this optimizer are gone, and their rows' state with them; keep the module "
                "while its optimizer is used"
            )
        found = {path: part for path, part in module.named_modules() if isinstance(part, HasWeight)}
        return {f"{path}.weight" if path else "weight": part for path, part in found.items()}

    def save(self, num_updates: int) -> dict[str, dict[str, Tensor]]:
        """Return the state; it is empty for frozen tables, and within ``without_rows()``."""
        module = self._module()
        if rows_are_left_out() or (module is not None and module.frozen):
            return {}
        return {key: self._of(key, view, num_updates) for key, view in self._views().items()}

    def _of(self, key: str, view: HasWeight, num_updates: int) -> dict[str, Tensor]:
        state = {f"{view.name}.step": torch.tensor(float(num_updates), dtype=torch.float32, device="cpu")}
        shapes = self._shapes(view)
        if shapes and is_large(view.table):
            name = f"{view.name}.{LEFT_OUT}"
            return state | {name: mark(view.rows_version(), view.table, f"{key}'s {name}")}
        parts = {
            name: torch.empty(shape, dtype=torch.float32, device="cpu") for name, shape in shapes.items()
        }
        for begin, end in id_ranges(0, view.num_embeddings) if parts else ():
            for name, values in view.optimizer_rows(torch.arange(begin, end, device="cpu")).items():
                parts[name][begin:end] = values
        return state | {f"{view.name}.{name}": values for name, values in parts.items()}

    def _shapes(self, view: HasWeight) -> dict[str, tuple[int, ...]]:
        module = self._module()
        assert module is not None
        spec = module.fused_optimizer.spec_of(view.name)
        rows, dim = view.num_embeddings, view.embedding_dim
        return {name: spec.state_shape(name, rows, dim) for name in spec.state_names}

    def load(self, state: Mapping[str, Mapping[str, object]], num_updates: int) -> None:
        """Take the state of :meth:`save`; within ``without_rows()`` only the number of updates.

        Raises ``ConfigError`` for a state of other tables, and for a missing state of tables that were
        updated, and ``StoreMismatchError`` where the state of a large table was left out. Nothing has changed
        then.
        """
        module, parts = self._module(), {}
        if not rows_are_left_out() and module is not None and not module.frozen:
            views = self._views()
            keeps_state = any(map(self._shapes, views.values()))
            if set(state) != set(views) and (state or (num_updates and keeps_state)):
                raise ConfigError(
                    f"this is the optimizer state of {sorted(state) or 'no rows'}, and the tables are "
                    f"{sorted(views)}; where commits keep the rows, load it within "
                    "`with tierstore.checkpoint.without_rows():`"
                )
            parts = {key: self._checked(key, view, state[key]) for key, view in views.items() if state}
            for key, part in parts.items():
                self._write(views[key], part)
        if module is not None:
            module.set_updates(num_updates)

    def _checked(self, key: str, view: HasWeight, given: Mapping[str, Any]) -> dict[str, Tensor]:
        state = {name.rpartition(".")[2]: value for name, value in given.items()}
        state.pop("step", None)
        if is_mark(state.get(LEFT_OUT)):
            check_mark(state[LEFT_OUT], view.rows_version(), f"the optimizer state of {key}")
            return {}
        shapes = self._shapes(view)
        found = {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}
        if found != shapes:
            raise ConfigError(f"the optimizer state of {key} must be {shapes}, not {found}")
        return state

    @staticmethod
    def _write(view: HasWeight, parts: Mapping[str, Tensor]) -> None:
        for begin, end in id_ranges(0, view.num_embeddings) if parts else ():
            ids = torch.arange(begin, end, device="cpu")
            view.load_rows(ids, view.rows(ids), {name: value[begin:end] for name, value in parts.items()})
