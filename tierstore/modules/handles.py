"""Names by which the operators of compiled graphs find their modules, without keeping these alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from tierstore.errors import ClosedError
from tierstore.modules.parts import Lookup
from tierstore.modules.row_updates import Updates


class Looked(Updates, Protocol):
    """The part of a module that the operators use."""

    @property
    def observer(self) -> object: ...

    @property
    def frozen(self) -> bool: ...

    def find_lookup(self, *args: object, **kwargs: object) -> Lookup:
        """Return the lookup of forward's arguments, made ahead or now."""
        ...

    def pin(self, lookup: Lookup, updates: bool) -> None:
        """Get the rows of ``lookup``: pinned for an update, or copied."""
        ...

    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[object, ...]:
        """Return forward's arguments (per-sample weights excepted) of an operator's."""
        ...

    def ids_by_feature(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> list[Tensor]:
        """Return copies of each feature's ids; arguments as for ``forward_arguments``."""
        ...

    def anchors(self) -> Sequence[Tensor]:
        """Return the tensors that autograd trains in place of the rows."""
        ...


class Handles:
    """Modules by a name that no other module of this process has had before."""

    def __init__(self) -> None:
        self._modules: WeakValueDictionary[str, Looked] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()

    def add(self, module: Looked, tables: Sequence[str]) -> str:
        """Return the name of ``module``: its tables, and how many modules have had these before."""
        name = ",".join(tables)
        handle = f"{name}#{self._counts[name]}"
        self._counts[name] += 1
        self._modules[handle] = module
        return handle

    def find(self, handle: str) -> Looked:
        """Return the module. Raises ClosedError if it is gone."""
        module = self._modules.get(handle)
        if module is None:
            raise ClosedError(
                f"the graph looks rows up in {handle!r}, a module of tables that this process does not have "
                "(any more). Keep the module for as long as graphs of it run, or compile or export the model "
                "that has the tables now"
            )
        return module


MODULES = Handles()
