"""Tables as modules see them: their engine, which may be shared, and their place in a state dict."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from tierstore.cache.engine import Engine, Table
from tierstore.cache.late_engine import LateEngine
from tierstore.cache.machine import check_machine
from tierstore.config import TierConfig
from tierstore.default_config import default_config
from tierstore.errors import ConfigError, InputError
from tierstore.modules.left_out import check_mark, is_large, is_mark, mark
from tierstore.optim import SGD, OptimizerSpec
from tierstore.optim.tables import Optimizers, by_table

_CHUNK = 1 << 16
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""torch's name of each dtype that a table may have."""
SHOWN = "tiered_weight"
"""Name of the parameter that stands for a table."""


@dataclass(frozen=True)
class SharedEngine:
    """An engine that several modules use; its tables are named ``prefix`` + their name in the module."""

    engine: Engine
    prefix: str = ""


@dataclass(frozen=True)
class Opening:
    """Arguments that open a module's tables: in the engine of ``shared``, or in a new engine."""

    config: TierConfig | None
    optimizer: Optimizers
    seed: int
    shared: SharedEngine | None
    device: Device = None
    """Where the rows of ``hbm`` are; None: as ``config`` says."""
    on_meta: bool = False
    """Whether the tables have no rows before they are sharded or moved off the meta device."""
    late: bool = False
    """Whether the tables are opened by the first call that needs a row."""


@dataclass(frozen=True)
class OpenTables:
    """The engine of a module's tables, which may not have opened them yet, and their ``numbers`` in it."""

    engine: Engine
    numbers: Sequence[int]


def open_tables(tables: Sequence[Table], opening: Opening) -> OpenTables:
    """Open ``tables``. Raises ConfigError if ``optimizer`` is none of ours, or not for these tables, and for
    budgets that are too small."""
    shared = opening.shared
    if shared is not None:
        numbers = [shared.engine.table_index(shared.prefix + table.name) for table in tables]
        return OpenTables(shared.engine, numbers)
    tables = with_optimizers(tables, opening.optimizer)
    one = opening.optimizer if isinstance(opening.optimizer, OptimizerSpec) else SGD()
    config = default_config() if opening.config is None else opening.config
    config = placed(config, opening.device)
    check_machine(config)
    given = (tables, config, one, opening.seed)
    waits = opening.late or opening.on_meta
    engine = LateEngine(*given, opening.on_meta) if waits else Engine(*given)
    return OpenTables(engine, list(range(len(tables))))


def with_optimizers(
    tables: Sequence[Table], optimizer: Optimizers, names: Sequence[str] | None = None
) -> list[Table]:
    """Return ``tables`` with their optimizers, where these have names; frozen tables have the rows of SGD.

    ``names``: of all tables that ``optimizer`` is for; None: these. Raises ConfigError for what ``by_table``
    refuses.
    """
    each = by_table(optimizer, [table.name for table in tables] if names is None else names)
    if not isinstance(optimizer, Mapping):
        return list(tables)
    return [replace(table, optimizer=each[table.origin or table.name] or SGD()) for table in tables]


def is_meta(device: Device) -> bool:
    """Return whether ``device`` is torch's meta device, or None where that is torch's default device."""
    return (torch.get_default_device() if device is None else torch.device(device)).type == "meta"


def check_device(device: torch.device) -> None:
    """Raise ConfigError for a device that has no tiers."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device}; tiers are on the CPU or a GPU, so use 'cpu', 'cuda' or None")


def placed(config: TierConfig, device: Device) -> TierConfig:
    """Return ``config`` with ``device``, where a module's tables are to be, if it names no device itself.

    Raises ConfigError for a device that has no tiers, and for one that is not the configuration's.
    """
    if device is None or not isinstance(config, TierConfig):
        return config
    asked = torch.device(device)
    check_device(asked)
    if config.device is None:
        return replace(config, device=asked)
    own = torch.device(config.device)
    if own.type != asked.type or (None not in (own.index, asked.index) and own.index != asked.index):
        raise ConfigError(
            f"device is {asked}, but the configuration has device={config.device!r}; leave one of them out"
        )
    return config


def table_dtype(dtype: torch.dtype | None, weight: Tensor | None = None) -> str:
    """Return our name of a table's dtype: torch's ``dtype``, or else that of ``weight`` if a table can have
    it, or else float32.

    Raises ConfigError for a dtype that tables cannot have.
    """
    names = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
    if dtype is None:
        return "fp32" if weight is None else names.get(weight.dtype, "fp32")
    if dtype not in names:
        raise ConfigError(
            f"dtype is {dtype}, but weights of a table are {', '.join(map(str, names))}; use one of these. "
            'Lower tiers may hold float32 tables in 8 bits: TierConfig(ssd_dtype="int8")'
        )
    return names[dtype]


def check_unsupported(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Raise ConfigError for options of torch's embeddings that the kernels do not have."""
    if max_norm is not None:
        raise ConfigError("max_norm is not supported, since lookups do not change rows; leave it None")
    if scale_grad_by_freq:
        raise ConfigError(
            "scale_grad_by_freq is not supported, since gradients of a row are summed; leave it False"
        )


def is_fresh(engine: Engine) -> bool:
    """Return whether no rows were committed to the engine's store before it was opened."""
    return engine.store is None or not engine.store.meta()


def id_ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ids from ``begin`` to ``end`` in ranges whose rows are copied in one call."""
    for first in range(begin, end, _CHUNK):
        yield first, min(first + _CHUNK, end)


def save_table(module: HasWeight, table: Table, destination: dict[str, Tensor], key: str) -> None:
    """Put the weights of a table into a state dict. ``module`` has ``rows`` and ``rows_version``."""
    if module.on_meta:
        shape = (table.num_embeddings, table.embedding_dim)
        destination[key] = torch.empty(shape, dtype=module.dtype, device="meta")
        return
    if is_large(table):
        destination[key] = mark(module.rows_version(), table, key)
        return
    weight = torch.empty(table.num_embeddings, table.embedding_dim, dtype=module.dtype, device="cpu")
    for begin, end in id_ranges(0, table.num_embeddings):
        weight[begin:end] = module.rows(torch.arange(begin, end, device="cpu"))
    destination[key] = weight


def load_table(module: HasWeight, table: Table, weight: Tensor, key: str) -> None:
    """Write all rows of a table from a dense tensor, or check the version of rows that were left out."""
    if is_mark(weight):
        check_mark(weight, module.rows_version(), key)
        return
    shape = (table.num_embeddings, table.embedding_dim)
    if tuple(weight.shape) != shape:
        raise InputError(f"size mismatch for {key}: got {tuple(weight.shape)}, the table has {shape}")
    for begin, end in id_ranges(0, shape[0]):
        module.load_rows(torch.arange(begin, end, device="cpu"), weight[begin:end])


class ThreadFlag(threading.local):
    """Whether something holds for this thread at the moment."""

    on = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


def without_rows() -> AbstractContextManager[None]:
    """Save and load this thread's state dicts without tables and their optimizer state in the block."""
    return _rows_left_out.raised()


def rows_are_left_out() -> bool:
    """Return whether this thread is in :func:`without_rows`."""
    return _rows_left_out.on


_rows_left_out = ThreadFlag()


class HasWeight(nn.Module):
    """A module of one table, which is ``weight`` in its state dict.

    The module has ``rows``, ``optimizer_rows`` and ``load_rows``.
    """

    @property
    def table(self) -> Table:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the table's weights."""
        return TORCH_DTYPES[self.table.dtype]

    def rows_version(self) -> str:
        """Return the version of the rows, as :class:`tierstore.cache.versions.Versions` names it."""
        raise NotImplementedError

    @property
    def on_meta(self) -> bool:
        """Whether the table has no rows, since its module is on the meta device."""
        return False

    def show_parameter(self, trained: bool, device: str) -> ShownParameter:
        """Add a parameter without rows, ``tiered_weight``, on the tables' device, and return where it is.

        The parameter says whether the table is trained, and it shows what code does to all parameters of a
        model: freezing, wrapping, applying optimizers. No state dict has it."""
        empty = torch.empty(0, self.table.embedding_dim, dtype=torch.float32, device=device)
        parameter = nn.Parameter(empty, requires_grad=trained)
        self.register_parameter(SHOWN, parameter)
        return ShownParameter(self, parameter)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "the rows of this table are in tiers, not in a weight tensor; read them with rows(ids), "
                "write them with load_rows(ids, weight)"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse a ``weight`` that no lookup would read, as of ``functional_call`` with a state dict."""
        if name == "weight":
            raise ConfigError(
                f"the rows of table {self.table.name!r} are in tiers, and lookups would not read a weight "
                "that is set here; write rows with load_rows(ids, weight) or load_state_dict()"
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]

    def save_weight(self, destination: dict[str, Tensor], key: str) -> None:
        """Put the table's weights, (num_embeddings, dim), into a state dict as ``key``."""
        save_table(self, self.table, destination, key)

    def load_weight(self, weight: Tensor, key: str) -> None:
        """Overwrite all rows with ``weight``, (num_embeddings, dim); ``key`` names it in errors."""
        load_table(self, self.table, weight, key)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + SHOWN, None)
        if _rows_left_out.on:
            return
        self.save_weight(destination, prefix + "weight")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        without = _rows_left_out.on
        others = {name: value for name, value in state_dict.items() if without or name != key}
        shown = self._parameters.pop(SHOWN, None)
        try:
            super()._load_from_state_dict(
                others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            if shown is not None:
                self._parameters[SHOWN] = shown
        if without:
            return
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            self.load_weight(state_dict[key], key)
        except InputError as error:
            error_msgs.append(str(error))


class ShownParameter:
    """The parameter that stands for the table of ``holder``.

    The parameter keeps no reference to the holder: a module of one table is its own holder, and tables end
    with the last reference of their user."""

    __slots__ = ("_first", "_holder", "_parameters")

    def __init__(self, holder: HasWeight, parameter: nn.Parameter) -> None:
        self._first = parameter
        self._holder = weakref.ref(holder)
        self._parameters = holder._parameters

    @property
    def now(self) -> Tensor:
        """The parameter as it is now: wrappers may replace the one that was registered."""
        parameter = self._parameters.get(SHOWN)
        return getattr(self._holder(), SHOWN, self._first) if parameter is None else parameter

    def accept(self) -> None:
        """Take the parameter as it is now for the one that was registered: it was moved, not wrapped."""
        parameter = self._parameters[SHOWN]
        assert parameter is not None
        self._first = parameter

    @property
    def is_registered(self) -> bool:
        """Whether no wrapper has replaced the parameter."""
        return self._parameters.get(SHOWN) is self._first


def all_trained(shown: Sequence[ShownParameter]) -> bool:
    """Return whether no table is frozen."""
    try:
        for one in shown:  # noqa: SIM110  # all() takes half as long again, and every forward call asks
            if not one._parameters[SHOWN].requires_grad:  # type: ignore[union-attr]
                return False
        return True
    except (KeyError, AttributeError):  # a wrapper has replaced a parameter
        return all(one.now.requires_grad for one in shown)


def leaf_of(shown: Sequence[ShownParameter], anchor: Tensor) -> Tensor | None:
    """Return the tensor that autograd trains in place of rows: the parameter of a trained table, so that
    ``backward(inputs=[*model.parameters()])`` reaches the rows, or ``anchor`` where a wrapper replaced it.
    None if all tables are frozen."""
    for one in shown:
        found = one._parameters.get(SHOWN)  # one.now, without a call where no wrapper has replaced it
        parameter = one.now if found is None else found
        if parameter.requires_grad:
            return parameter if type(parameter) is nn.Parameter else anchor
    return None
