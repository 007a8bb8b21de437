"""Configuration of the tiers: budgets, where the store lives, and how rows move."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeGuard

from tierstore.errors import ConfigError
from tierstore.folders import paths_of
from tierstore.row_format import STATE_BYTES, WEIGHT_BYTES, WIDE, RowFormat

ENGINE_NAMES = ["native", "rocksdb", "lmdb", "memory"]
"""Names that ``TierConfig(engine=...)`` accepts; ``tierstore.store.register_engine`` adds to it."""

_ONE_FOLDER = ("rocksdb", "lmdb", "memory")

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}IB"] = 1 << (10 * _power)
    _UNITS[f"{_letter}B"] = 10 ** (3 * _power)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
MAX_DEPTH = 64
_AUTO_SSD = 1 << 40
_IO_NAMES = ("auto", "uring", "pread")
_UVM_KINDS = ("pinned", "managed")
INDEX_NAMES = ("auto", "hash", "compact")
"""Names that ``TierConfig(index=...)`` accepts."""
FATAL, WARNING, IGNORE = BOUNDS_CHECKS = ("fatal", "warning", "ignore")
"""Names that ``TierConfig(bounds_check=...)`` accepts."""


def is_integer(value: Any, minimum: int = 0, maximum: float = math.inf) -> TypeGuard[int]:
    """Tell whether ``value`` is an ``int`` from ``minimum`` to ``maximum``; a ``bool`` is no integer."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether ``value`` is an ``int`` or ``float``; a ``bool`` is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return the bytes of ``size``: an integer, or a string as "64MiB", "1.5 GiB", "64MB" (decimal), "4096".

    Raises ``ConfigError`` that starts with ``name`` and says which forms work.
    """
    if isinstance(size, Integral) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"{name} is {size}; give 0 or more bytes")
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match.group(2).upper() or "B") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name} is {size!r}; write bytes as an integer or a string with a unit, such as 67108864, "
            f'"64MiB" (2**20 bytes each) or "64MB" (10**6 bytes each); units go up to PiB and PB'
        )
    number = match.group(1)
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def format_bytes(size: int) -> str:
    """Return ``size`` bytes for people, in binary units: ``"1.5 GiB"``, ``"64 MiB"``, ``"272 B"``."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    text = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{text} {unit}"


def _check_rounding(value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"stochastic_rounding is {value!r}; it must be True or False")


def check_bounds_check(value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of :data:`BOUNDS_CHECKS`."""
    if value not in BOUNDS_CHECKS:
        raise ConfigError(
            f"bounds_check is {value!r}; it must be one of {', '.join(map(repr, BOUNDS_CHECKS))}"
        )


@dataclass(frozen=True)
class TableOverride:
    """Overrides of a module's arguments for one table; ``None`` keeps the module's argument."""

    init: Any = None
    """Rule of the initial values, as the module's ``init``."""
    seed: int | None = None
    hbm: int | str | None = None
    """Bytes of ``hbm`` for this table alone, metadata included: the table never has fewer or more bytes. With
    room for all rows of the table no row ever leaves. None: the table shares the bytes that such tables
    leave, unless it is so small that it is kept whole."""
    uvm: int | str | None = None
    """The same of ``uvm``."""
    stochastic_rounding: bool | None = None
    """As in :class:`TierConfig`, for the rows of this table."""
    hbm_share: int | None = None
    """The weight of a table that shares, where ``hbm`` is divided among row layouts; None: its bytes."""
    uvm_share: int | None = None
    """The same of ``uvm``."""
    bounds_check: str | None = None
    """As in :class:`TierConfig`, for ids of this table."""

    def __post_init__(self) -> None:
        for name in ("hbm", "uvm", "hbm_share", "uvm_share"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value, name))
        _check_rounding(self.stochastic_rounding)
        if self.bounds_check is not None:
            check_bounds_check(self.bounds_check)


@dataclass(frozen=True)
class TierConfig:
    """Budgets of the tiers, the store below them and the rules by which rows move.

    Sizes are bytes or strings (:func:`parse_bytes`) and become ``int``. Budgets include metadata.

    - ``device``: where ``hbm`` is, and kernels work: "cpu", "cuda" (torch's current GPU; of sharded tables
      the one with the rank's LOCAL_RANK) or "cuda:1". None: the device that a module is built with, else the
      CPU. On a GPU the rows of ``hbm`` are in the GPU's memory; their metadata, which the budget counts, too,
      is in the host's memory.
    - ``hbm``: the cache that kernels work on. ``"all"`` keeps every touched row in memory with no tier below:
      ``uvm`` and ``ssd`` are then 0, and no other size is accepted for them.
    - ``uvm``: host memory below ``hbm``, 0 for none.
    - ``uvm_kind``: how a GPU reaches ``uvm``: "pinned", host memory that is locked and registered with the
      driver, or "managed", CUDA's managed memory, which is kept on the host, and may not be more than the
      GPU has free.
    - ``ssd``: hard cap of the store's files, 0 for no store: memory must hold all touched rows. ``"auto"``:
      what the file system has, up to 1 TiB.
    - ``path``: folder of the store, in a folder that exists; ``None`` means a temporary one, deleted on
      close. A list of folders, one on each of several devices, spreads the store over them (native engine):
      reads and writes of all devices add up. The first folder is the store's own; further folders hold shares
      of the rows. Give all folders whenever the store is opened; one more folder adds a device. ``ssd`` caps
      them together.
    - ``engine``: the row store, one of :data:`ENGINE_NAMES`.
    - ``policy``: which rows leave a memory tier: a name of ``cache_policies``, "module:Class" or a policy
      object.
    - ``admission``: which missed rows get a slot in ``hbm`` at all: "always", "counter(n)", "bloom(n)" or an
      admission filter of ``cache_policies``. Other rows use transient overflow slots and are written through.
    - ``depth``: batches that are fetched ahead, 0 to 64, or "auto".
    - ``window``: batches whose ids are looked at ahead, or "auto".
    - ``read_ahead``: memory for rows that are read from the store before their batch is planned, and for
      windows beyond 16 MiB, beside the budgets of the tiers; 0 for none. "auto": up to an eighth of the
      tables' bytes, 1/64 of this machine's memory and 4 GiB; less where more would save the drives next to
      nothing, chosen after stated lookups. The log (INFO) says where the same bytes of ``uvm`` or ``hbm``
      would save them more. The memory is taken as the window has use for it.
    - ``ssd_dtype``, ``uvm_dtype``: how the store and ``uvm`` hold weights of float32 tables: "fp32", "bf16",
      "fp16" or "int8" (with a step and an offset per row). In ``hbm`` these weights are float32.
      ``uvm_dtype`` is "fp32" or ``ssd_dtype``. Tables of float16 or bfloat16 have their dtype in every tier.
    - ``state_dtype``: how the store holds optimizer state, "fp32" or "bf16"; ``uvm`` does the same if its
      dtype is the store's.
    - ``stochastic_rounding``: round up or down at random, so that numbers are right on average (True), or to
      the nearest value (False): weights (and state) of float32 tables where they leave ``hbm``, weights of
      float16 and bfloat16 tables in every update. None: at random in the first case, to the nearest value in
      the second, as torch's optimizers do.
    - ``tables``: per-table overrides by table name.
    - ``check_gradients``: report NaN and infinite gradients as an error before they reach a row.
    - ``overcommit``: allow ``hbm``, ``uvm`` and ``read_ahead`` beyond this machine's memory, and ``ssd``
      beyond the size of its file system.
    - ``io``: how the native store reads: ``"uring"`` (an error where the kernel refuses io_uring),
      ``"pread"`` (threads), or ``"auto"``, io_uring where the kernel allows it. ``stats()`` tells which.
    - ``bounds_check``: what an id does that its table does not have: "fatal" raises InputError, "warning"
      takes it for id 0 and warns once, "ignore" takes it for id 0.
    - ``index``: how the native store finds rows. ``"hash"`` takes up to 12 bytes per stored row.
      ``"compact"`` takes 3 to 4 bytes per row in ranges of which 3/8 of the ids are stored. ``"auto"``:
      compact for tables of 65,536 stored rows or more. Each opening may choose anew.
    """

    hbm: int | str = "64MiB"
    uvm: int | str = 0
    ssd: int | str = "auto"
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    engine: str = "native"
    policy: Any = "lookahead"
    admission: Any = "always"
    depth: int | str = "auto"
    window: int | str = "auto"
    read_ahead: int | str = "auto"
    ssd_dtype: str = "fp32"
    uvm_dtype: str = "fp32"
    state_dtype: str = "fp32"
    stochastic_rounding: bool | None = None
    tables: Mapping[str, TableOverride] = field(default_factory=dict)
    check_gradients: bool = False
    overcommit: bool = False
    io: str = "auto"
    index: str = "auto"
    bounds_check: str = FATAL
    device: Any = None
    uvm_kind: str = "pinned"

    def __post_init__(self) -> None:
        self._check_device()
        self._normalise_sizes()
        self._check_path()
        if self.engine not in ENGINE_NAMES:
            raise ConfigError(f"unknown engine {self.engine!r}; known engines: {', '.join(ENGINE_NAMES)}")
        if self.io not in _IO_NAMES:
            raise ConfigError(f"io is {self.io!r}; it must be one of {', '.join(map(repr, _IO_NAMES))}")
        if self.index not in INDEX_NAMES:
            names = ", ".join(map(repr, INDEX_NAMES))
            raise ConfigError(f"index is {self.index!r}; it must be one of {names}")
        check_bounds_check(self.bounds_check)
        if self.uvm_kind not in _UVM_KINDS:
            raise ConfigError(
                f"uvm_kind is {self.uvm_kind!r}; it must be one of {', '.join(map(repr, _UVM_KINDS))}"
            )
        self._check_policy()
        self._check_dtypes()
        self._normalise_count("depth", MAX_DEPTH)
        self._normalise_count("window", None)
        if not isinstance(self.tables, Mapping):
            raise ConfigError("tables must map table names to TableOverride")
        for name, override in self.tables.items():
            if not isinstance(override, TableOverride):
                raise ConfigError(f"tables[{name!r}] is {override!r}; it must be a TableOverride")

    @property
    def keeps_all(self) -> bool:
        """Tell whether ``hbm`` is ``"all"``: one memory tier that grows with the rows touched."""
        return self.hbm == "all"

    @property
    def on_gpu(self) -> bool:
        """Tell whether ``hbm`` is in the memory of a GPU."""
        return self.device not in (None, "cpu")

    @property
    def ssd_cap(self) -> int:
        """Return the most bytes that the store's files may take; 0 for no store."""
        return _AUTO_SSD if self.ssd == "auto" else int(self.ssd)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the folders of the store, the first one first; none for a temporary store."""
        return paths_of(self.path)

    @property
    def where(self) -> str:
        """Return the folders of the store, for messages."""
        return ", ".join(map(str, self.paths))

    @property
    def lower_format(self) -> RowFormat:
        """Return how rows are held in the store, or in ``uvm`` where there is no store."""
        if self.ssd:
            return RowFormat(self.ssd_dtype, self.state_dtype)
        return RowFormat(self.uvm_dtype, self.state_dtype) if self.uvm else WIDE

    @property
    def uvm_format(self) -> RowFormat:
        """Return how ``uvm`` holds rows: as the store does, or in float32."""
        lower = self.lower_format
        return lower if lower.weights == self.uvm_dtype else WIDE

    def formats(self, dtype: str) -> dict[str, RowFormat]:
        """Return by tier how rows of a table of ``dtype`` are held."""
        own = RowFormat(dtype)
        if own.is_wide:
            return {"hbm": own, "uvm": self.uvm_format, "ssd": self.lower_format}
        return dict.fromkeys(("hbm", "uvm", "ssd"), own)

    def check_dtype(self, table: str, dtype: str) -> None:
        """Raise ``ConfigError`` if tiers are to hold other dtypes than a table of ``dtype`` has."""
        if dtype == WIDE.weights:
            return
        for name, value in (("ssd_dtype", self.ssd_dtype), ("uvm_dtype", self.uvm_dtype)):
            if value not in (WIDE.weights, dtype):
                raise ConfigError(
                    f"{name} is {value!r}, but table {table!r} has {dtype} weights, which every tier holds "
                    f"as they are; leave {name} out, or make a float32 table"
                )
        if self.state_dtype != WIDE.state:
            raise ConfigError(
                f"state_dtype is {self.state_dtype!r}, but table {table!r} has {dtype} weights, and the "
                "optimizer state of such tables is float32 in every tier; leave state_dtype out, or make a "
                "float32 table"
            )

    def rounds_stochastically(self, table: str, dtype: str) -> bool:
        """Return whether rows of a table of ``dtype`` are rounded up or down at random."""
        own = self.table(table).stochastic_rounding
        chosen = self.stochastic_rounding if own is None else own
        return dtype == WIDE.weights if chosen is None else chosen

    def bounds_check_of(self, table: str) -> str:
        """Return what ids of a table do that it does not have."""
        return self.table(table).bounds_check or self.bounds_check

    def table(self, name: str) -> TableOverride:
        """Return the overrides of a table; all of them are ``None`` where the user gave none."""
        return self.tables.get(name, TableOverride())

    def check_tables(self, names: Iterable[str]) -> None:
        """Raise ``ConfigError`` when ``tables`` names a table that is not in ``names``."""
        names = list(names)
        unknown = [name for name in self.tables if name not in names]
        if unknown:
            raise ConfigError(f"overrides for unknown tables {unknown}; the tables are {names}")

    def _normalise_sizes(self) -> None:
        if self.read_ahead != "auto":
            object.__setattr__(self, "read_ahead", parse_bytes(self.read_ahead, "read_ahead"))
        if self.hbm == "all":
            for name in ("uvm", "ssd"):
                given = getattr(self, name)
                if given != "auto" and parse_bytes(given, name):
                    raise ConfigError(
                        f'{name} is {given!r}, but hbm="all" keeps every row in memory, so {name} would hold '
                        f"nothing; leave {name} out, or give hbm bytes"
                    )
                object.__setattr__(self, name, 0)
            return
        for name in ("hbm", "uvm", *(() if self.ssd == "auto" else ("ssd",))):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if self.hbm == 0:
            raise ConfigError(
                'hbm is 0, but kernels need a cache to work on; give it bytes, such as hbm="64MiB"'
            )

    def _check_device(self) -> None:
        if self.device is None:
            return
        if _DEVICE.fullmatch(name := str(self.device)) is None:
            raise ConfigError(
                f'device is {self.device!r}; it must be "cpu", "cuda" or a GPU such as "cuda:1"'
            )
        object.__setattr__(self, "device", name)  # a torch.device becomes its name

    def _check_path(self) -> None:
        if self.path is None:
            return
        paths = paths_of(self.path)
        object.__setattr__(self, "path", paths if len(paths) > 1 else paths[0])
        if len(paths) > 1 and self.engine in _ONE_FOLDER:
            raise ConfigError(
                f"engine {self.engine!r} keeps a store in one folder, and path has {len(paths)}; give one "
                'path, or engine="native"'
            )
        if self.ssd == 0:
            why = 'hbm="all" keeps every row in memory' if self.keeps_all else "ssd is 0"
            raise ConfigError(
                f"path is {self.path!r}, but {why}, so nothing would be stored there; leave one out"
            )

    def _check_dtypes(self) -> None:
        for name in ("ssd_dtype", "uvm_dtype", "state_dtype"):
            known = STATE_BYTES if name == "state_dtype" else WEIGHT_BYTES
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.ssd and self.uvm and self.uvm_dtype not in ("fp32", self.ssd_dtype):
            raise ConfigError(
                f"uvm_dtype is {self.uvm_dtype!r} and ssd_dtype {self.ssd_dtype!r}: rows would be rounded "
                f'twice; give uvm_dtype="fp32" or ssd_dtype="{self.uvm_dtype}"'
            )
        _check_rounding(self.stochastic_rounding)

    def _check_policy(self) -> None:
        if self.admission != "always":
            import cache_policies

            try:
                cache_policies.get_admission(self.admission)
            except cache_policies.PolicyError as error:
                raise ConfigError(f"admission: {error}") from None
        if not isinstance(self.policy, str):
            if not callable(getattr(self.policy, "compile", None)):
                raise ConfigError(
                    f"policy {self.policy!r} is neither a name nor an object with compile(capacity)"
                )
            return
        import cache_policies  # here, since it brings numba along

        try:
            cache_policies.get(self.policy)
        except cache_policies.PolicyError as error:
            raise ConfigError(str(error)) from error

    def _normalise_count(self, name: str, maximum: int | None) -> None:
        value = getattr(self, name)
        if value == "auto":
            return
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or value < 0 or (maximum is not None and value > maximum):
            bound = "of at least 0" if maximum is None else f"from 0 to {maximum}"
            raise ConfigError(f'{name} is {value!r}; it must be "auto" or an integer {bound}')
        object.__setattr__(self, name, int(value))
