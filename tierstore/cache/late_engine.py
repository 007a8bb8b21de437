"""An engine that waits with its tiers and store until the first call that needs a row."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakMethod

from tierstore.cache.engine import Engine
from tierstore.cache.table import Table
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.optim.specs import OptimizerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

_OPENED = ("device", "store", "groups", "versions", "warn_of_loss", "_group_of", "_position")
"""Attributes that opening gives an engine."""


class LateEngine(Engine):
    """An engine whose description alone is known until a call needs a row; that call opens it.

    Until then it takes no memory and no folder, and :meth:`set_optimizer` may change the row layout. While it
    is ``on_meta`` it is never opened: such a call raises ConfigError.
    """

    waits = True

    def __init__(
        self,
        tables: Sequence[Table],
        config: TierConfig,
        optimizer: OptimizerSpec,
        seed: int = 0,
        on_meta: bool = False,
    ) -> None:
        self.on_meta = on_meta
        self._opening = threading.RLock()
        self._before: WeakMethod[Callable[[], None]] | None = None
        self._after: WeakMethod[Callable[[], None]] | None = None
        super().__init__(tables, config, optimizer, seed)

    @property
    def device_name(self) -> str:
        """The device of the rows; before they are there, where they will be."""
        if self.on_meta:
            return "meta"
        return str(self.config.device or "cpu") if self.waits else super().device_name

    def call_when_opened(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call two methods of the module, of which no reference is kept, before and after the opening."""
        self._before, self._after = WeakMethod(before), WeakMethod(after)

    def set_optimizer(self, optimizer: OptimizerSpec, tables: Sequence[Table]) -> None:
        """Set what the tables are opened with: ``optimizer``, or their own. Only before they are opened."""
        assert self.waits, "rows have their layout"
        self.optimizer, self.tables = optimizer, list(tables)
        self.specs = self._stored_tables()

    def need_rows(self) -> None:
        """Open the tables, unless they are open. Raises ConfigError on the meta device."""
        self.check_open()
        with self._opening:
            if not self.waits:
                return
            if self.on_meta:
                names = ", ".join(table.name for table in self.tables)
                raise ConfigError(
                    f"tables {names} are on the meta device, which has no rows: shard them with "
                    "DistributedModelParallel, or give them tiers by to_empty(device='cpu') of their module"
                )
            self._notify(self._before)
            self.waits = False
            try:
                super()._open(0)
            except BaseException:
                self.waits = True
                for name in _OPENED:
                    self.__dict__.pop(name, None)
                raise
            self._notify(self._after)

    @staticmethod
    def _notify(method: WeakMethod[Callable[[], None]] | None) -> None:
        bound = None if method is None else method()
        if bound is not None:
            bound()

    def _open(self, at: int | str) -> None:
        if not self.waits:
            super()._open(at)

    def __getattr__(self, name: str) -> object:
        if name not in _OPENED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.need_rows()
        return self.__dict__[name]

    def close(self, *, commit: bool = True) -> None:
        if self.waits:
            self.closed = True
        else:
            super().close(commit=commit)

    def reset_stats(self) -> None:
        if not self.waits:
            super().reset_stats()

    def end_at_exit(self) -> None:
        if not self.waits:
            super().end_at_exit()
