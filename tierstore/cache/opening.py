"""Opens the tier groups of an engine: one per row layout, with tiers sized by the budgets."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from cache_policies.policy import Policy
from tierstore.cache.budget import GroupDemand, TableDemand, fast_tiers, host_tiers
from tierstore.cache.device import ComputedRows, Device
from tierstore.cache.division import UseDivision
from tierstore.cache.group import TierGroup
from tierstore.cache.layout import RowLayout
from tierstore.cache.machine import host_memory
from tierstore.cache.read_ahead_size import Bytes, ReadAheadSize
from tierstore.cache.stats import GroupStats
from tierstore.cache.table import Table
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.memory import MemoryTier, TierPlan
from tierstore.cache.tiers.read_ahead import bytes_per_row
from tierstore.cache.tiers.registry import TierFactory, TierRequest, make_tiers
from tierstore.cache.tiers.sizes import bytes_for, memory_limit
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.initializers import as_init, from_dict, table_seed
from tierstore.optim.base import GLOBAL
from tierstore.optim.specs import OptimizerSpec
from tierstore.rounds import record_bytes
from tierstore.row_format import WIDE, RowFormat
from tierstore.store.protocol import RowStore, StoredTable

_READ_AHEAD_SHARE = 8  # automatic reading ahead may take one in so many bytes of the tables
_READ_AHEAD_OF_MEMORY = 64
_READ_AHEAD_AT_MOST = 4 << 30
_SLOTS = 1 << 20  # many, by which a slot's bytes are known


def read_ahead_bytes(config: TierConfig, table_bytes: int) -> int:
    """Return the most bytes that rows read ahead may take; ``table_bytes``: of all rows of all tables."""
    if config.read_ahead != "auto":
        return int(config.read_ahead)
    memory = min(memory_limit(), host_memory())
    limit = min(memory // _READ_AHEAD_OF_MEMORY, _READ_AHEAD_AT_MOST)
    return min(table_bytes // _READ_AHEAD_SHARE, limit)


def stored_table(
    index: int, table: Table, config: TierConfig, optimizer: OptimizerSpec, seed: int
) -> StoredTable:
    """Return the description of a table that its store keeps. ``optimizer``, ``seed``: for tables without
    their own. Raises ``ConfigError`` for a format that cannot hold the optimizer's state."""
    override = config.table(table.origin or table.name)
    format, dim = config.formats(table.dtype)["ssd"], table.embedding_dim
    optimizer = table.optimizer or optimizer
    if optimizer.decays_all and format.state != WIDE.state:
        raise ConfigError(
            f"table {table.name!r}: state_dtype={format.state!r} cannot hold the numbers of updates, "
            f"which weight_decay_mode={GLOBAL!r} needs; use state_dtype='fp32' or another mode"
        )
    return StoredTable(
        name=table.name,
        index=index,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        row_bytes=format.row_bytes(dim, optimizer.state_floats(dim)),
        optimizer=optimizer.identity,
        seed=seed if override.seed is None else override.seed,
        init=as_init(override.init, table.init).to_dict(),
        weight_dtype=format.weights,
        state_dtype=format.state,
    )


class GroupOpening:
    """The tier groups of ``tables``, with their budgets divided among them; nothing is allocated yet.

    ``device``: has the rows of ``hbm``. Raises ``ConfigError`` for budgets that are too small, or too large
    for the device.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        specs: Sequence[StoredTable],
        config: TierConfig,
        optimizer: OptimizerSpec,
        policy: Policy,
        device: Device,
    ) -> None:
        self._tables = tables
        self._specs = specs
        self._config = config
        self._optimizers = [table.optimizer or optimizer for table in tables]
        self._policy = policy
        self._members: dict[str, list[int]] = {}
        for spec in specs:
            self._members.setdefault(self._layout_name(spec.index), []).append(spec.index)
        self._seeds = [
            table_seed(spec.seed, table.origin or table.name)
            for spec, table in zip(specs, tables, strict=True)
        ]
        demands = {tier: [self._demand(name, tier) for name in self._members] for tier in ("hbm", "uvm")}
        self._hbm = fast_tiers(config, demands["hbm"], policy, device)
        self._uvm = host_tiers(config, demands["uvm"], policy, self._hbm, device)

    def computed(self) -> list[ComputedRows]:
        """Return the kinds of rows that are looked up and updated."""
        pairs = zip(self._tables, self._optimizers, strict=True)
        return sorted({(table.embedding_dim, table.dtype, spec.step_args().kind) for table, spec in pairs})

    def groups(
        self, store: RowStore | None, factories: Sequence[TierFactory] | None = None
    ) -> list[TierGroup]:
        """Return the groups, with empty tiers above ``store``; ``factories`` as for :func:`make_tiers`."""
        plans = zip(self._members, self._hbm, self._uvm, strict=True)
        groups = [self._group(name, {"hbm": hbm, "uvm": uvm}, store, factories) for name, hbm, uvm in plans]
        rows = {spec.index: table.max_rows for spec, table in zip(self._specs, self._tables, strict=True)}
        UseDivision.of(groups, self._config, rows)
        return groups

    def _layout_name(self, index: int) -> str:
        """Return the name of a table's row layout, which tables of equal rows share."""
        table, dtype = self._tables[index], self._tables[index].dtype
        name = f"dim{table.embedding_dim}" + ("" if dtype == WIDE.weights else f"_{dtype}")
        rounds = self._config.rounds_stochastically(table.origin or table.name, dtype)
        is_rounded = not self._config.formats(dtype)["ssd"].is_wide
        if is_rounded and rounds != (dtype == WIDE.weights):
            name += "_stochastic" if rounds else "_nearest"
        identity = self._optimizers[index].identity
        if any(other.identity != identity for other in self._optimizers):
            name += "".join(f"_{value}" for value in identity.values())
        return name

    def _demand(self, name: str, tier: str) -> GroupDemand:
        pieces = Counter(table.origin or table.name for table in self._tables)
        tables = []
        for index in self._members[name]:
            table = self._tables[index]
            origin = table.origin or table.name
            override = self._config.table(origin)
            own, share = getattr(override, tier), getattr(override, f"{tier}_share")
            own = None if own is None else own // pieces[origin]
            is_whole = table.max_rows == table.num_embeddings
            tables.append(TableDemand(index, table.name, table.max_rows, own, share, is_whole))
        return GroupDemand(name, self._row_bytes(name, tier), tuple(tables))

    def _row_bytes(self, name: str, tier: str) -> int:
        """Return the bytes of a row of a layout in ``hbm``, ``uvm`` or the store (``ssd``)."""
        return self._formats(name)[tier].row_bytes(self._first(name).embedding_dim, self._state_floats(name))

    def _optimizer(self, name: str) -> OptimizerSpec:
        return self._optimizers[self._members[name][0]]

    def _state_floats(self, name: str) -> int:
        return self._optimizer(name).state_floats(self._first(name).embedding_dim)

    def _first(self, name: str) -> Table:
        return self._tables[self._members[name][0]]

    def _formats(self, name: str) -> dict[str, RowFormat]:
        return self._config.formats(self._first(name).dtype)

    def _rounds(self, name: str) -> bool:
        table = self._first(name)
        return self._config.rounds_stochastically(table.origin or table.name, table.dtype)

    def _codec(self, name: str) -> Codec | None:
        """Return the form of the rows of a layout in lower tiers; None if it is that of ``hbm``."""
        formats, dim = self._formats(name), self._first(name).embedding_dim
        seeds = self._seeds if self._rounds(name) else None
        if formats["ssd"] == formats["hbm"]:
            return None
        return Codec(formats["ssd"], dim, self._state_floats(name), seeds)

    def _group(
        self,
        name: str,
        slots: Mapping[str, TierPlan | None],
        store: RowStore | None,
        factories: Sequence[TierFactory] | None,
    ) -> TierGroup:
        hbm = slots["hbm"]
        assert hbm is not None
        codec = self._codec(name) if store is not None or slots["uvm"] is not None else None
        layout, stats, lock = self._layout(name, codec), GroupStats(len(self._tables)), threading.RLock()
        request = TierRequest(
            config=self._config,
            policy=self._policy,
            row_bytes=layout.row_bytes,
            codecs=self._codecs(codec),
            tables=len(self._tables),
            weights=layout.weights,
            dim=layout.dim,
            slots=slots,
            store=store,
            read_ahead_bytes=0 if store is None or not hbm.evicts else self._read_ahead_bytes(name),
            lock=lock,
            stats=stats,
        )
        group = TierGroup(name, layout, self._members[name], make_tiers(request, factories), stats, lock)
        if self._config.read_ahead == "auto" and request.read_ahead_bytes:
            group.size = self._size(name, group, request.read_ahead_bytes)
        return group

    def _size(self, name: str, group: TierGroup, most: int) -> ReadAheadSize:
        """Return what chooses the bytes of reading ahead: those that a memory tier could have instead. Tables
        that are resident lack no rows."""
        fast, lowest = group.fast.plan, group.stack.exclusive[-1]
        resident = {t for share in fast.own if share.holds_all for t in share.tables}
        tables = [(i, self._tables[i].max_rows) for i in self._members[name] if i not in resident]
        tiers = [tier for tier in group.stack.exclusive if isinstance(tier, MemoryTier)]
        own = sum(share.slots for share in fast.own if share.holds_all)
        wide, stored = self._row_bytes(name, "hbm"), self._row_bytes(name, "ssd")
        slot = bytes_for(_SLOTS, lowest.codec.row_bytes if lowest.codec else wide, self._policy) / _SLOTS
        sizes = Bytes(most, slot, bytes_per_row(stored), record_bytes(stored))
        return ReadAheadSize(tables, sum(tier.capacity for tier in tiers) - own, sizes)

    def _codecs(self, codec: Codec | None) -> dict[str, Codec]:
        """Return the tiers whose rows are in the form ``codec``."""
        if codec is None:
            return {}
        return {"ssd": codec, **({} if self._config.uvm_format.is_wide else {"uvm": codec})}

    def _layout(self, name: str, codec: Codec | None) -> RowLayout:
        table = self._first(name)
        return RowLayout.of(
            table.embedding_dim,
            self._state_floats(name),
            self._optimizer(name).initial_state,
            [from_dict(spec.init) for spec in self._specs],
            self._seeds,
            [table.column for table in self._tables],
            codec,
            table.dtype,
            self._rounds(name),
            int(self._optimizer(name).decays_all),
        )

    def _read_ahead_bytes(self, name: str) -> int:
        """Return this layout's part of the bytes that rows read ahead may take."""
        each = {name: self._table_bytes(name) for name in self._members}
        own, every = each[name], sum(each.values())
        rows = sum(self._tables[i].max_rows for i in self._members[name])
        most = math.ceil(rows * bytes_per_row(self._row_bytes(name, "ssd")))
        return min(read_ahead_bytes(self._config, every) * own // every, most)

    def _table_bytes(self, name: str) -> int:
        """Return the bytes of all rows of a layout in ``hbm``."""
        return self._row_bytes(name, "hbm") * sum(self._tables[i].max_rows for i in self._members[name])
