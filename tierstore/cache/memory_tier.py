"""One memory tier: the native arena and slot index, and the compiled policy that chooses its victims."""

from __future__ import annotations

import functools
import math
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

import cache_policies
from tierstore import _core
from tierstore.errors import ConfigError, PolicyFaultError, TierFullError

Slots = NDArray[np.int32]
Keys = NDArray[np.uint64]
Flags = NDArray[np.bool_]

MIN_SLOTS = 16
_PIECE = 1 << 13
_EXACT_UP_TO = 1 << 16
_MOST_PAD_ROWS = 1 << 26
_MOST_PAD_BYTES = 256 << 30  # of address space, which is 2**47 bytes
MAX_SLOTS = (1 << 31) - _MOST_PAD_ROWS - 1
"""Slots are int32, and the pad's come behind."""


def as_policy(policy: Any) -> Any:
    """The policy object of a name (an object stays as it is); ``ConfigError`` for offline ones."""
    policy = cache_policies.get(policy) if isinstance(policy, str) else policy
    if getattr(policy, "offline", False):
        raise ConfigError(
            f"policy {policy.name!r} needs the whole future of a trace, so it is for simulations only; "
            "'lookahead' uses as much of the future as training knows"
        )
    return policy


def as_admission(admission: Any) -> Any:
    """The admission filter of a name such as "counter(2)"; None for "always", which asks nothing."""
    filter_ = cache_policies.get_admission(admission)
    return None if filter_.name == "always" else filter_


def policy_bytes(policy: Any, slots: int) -> int:
    """Bytes of the arrays of a policy or an admission filter (None: 0) for ``slots``: exact where that is
    cheap to find out."""
    if policy is None:
        return 0
    exact = getattr(policy, "state_bytes", None)
    if exact is not None and slots <= _EXACT_UP_TO:
        return int(exact(max(1, slots)))
    per_slot, fixed = _estimate(policy)
    return math.ceil(per_slot * slots + fixed)


@functools.lru_cache(maxsize=8)
def _estimate(policy: Any) -> tuple[float, float]:
    """Asked once per policy object, which may measure large arrays for it."""
    return policy.bytes_per_slot, policy.fixed_bytes


def bytes_for(slots: int, row_bytes: int, policy: Any, admission: Any = "always") -> int:
    """What ``slots`` rows cost, index, policy and admission filter included."""
    arrays = policy_bytes(as_policy(policy), slots) + policy_bytes(as_admission(admission), slots)
    return math.ceil(slots * (row_bytes + _core.Tier.BYTES_PER_SLOT)) + arrays


def slots_for(budget: int, row_bytes: int, policy: Any, admission: Any = "always") -> int:
    """How many rows ``budget`` bytes hold, index, policy and admission filter included."""
    low, high = 0, min(MAX_SLOTS, budget // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for(middle, row_bytes, policy, admission) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def memory_limit() -> int:
    """Bytes that this process may come to use: the machine's memory, or half of its limit of address
    space (code and threads take of that, too)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    total = int(psutil.virtual_memory().total)
    return total if limit == resource.RLIM_INFINITY else min(total, limit // 2)


def _pad_rows(row_bytes: int) -> int:
    """For how many rows that overflow a tier address space is reserved: as many as memory could hold."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    # Where address space is limited, so much of it that dozens of row layouts find theirs.
    size = memory_limit() // 64 if limited else min(memory_limit(), _MOST_PAD_BYTES)
    return max(MIN_SLOTS, min(_MOST_PAD_ROWS, size // row_bytes))


class MemoryTier:
    """Rows of one layout in memory. Not thread-safe; see :class:`tierstore.cache.chain.Chain`.

    ``policy`` None means that the tier holds every row that it is given and never evicts. ``admission``
    refuses rows a slot: they are used from the pad, which a tier has if ``overflows``.

    Raises ``ConfigError`` when the system refuses the address space.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        row_bytes: int,
        policy: Any | None,
        *,
        admission: Any = "always",
        grows: bool = False,
        overflows: bool = True,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.row_bytes = row_bytes
        # The compiled policy owns the arrays that the native tier points to: keep it as long as the tier.
        self._policy = None if policy is None else as_policy(policy).compile(capacity)
        self.uses_window = policy is not None and as_policy(policy).uses_window
        self.policy_name = "none" if policy is None else as_policy(policy).name
        filter_ = None if policy is None else as_admission(admission)
        self._filter = None if filter_ is None else filter_.compile(capacity)
        self.policy_bytes = sum(policy_bytes(p and as_policy(p), capacity) for p in (policy, filter_))
        state, hooks = (0, None) if self._policy is None else (self._policy.state_address, self._policy.hooks)
        gate = (0, 0) if self._filter is None else (self._filter.state_address, self._filter.hooks["admit"])
        pad = _pad_rows(row_bytes) if overflows else 0
        try:
            self.native = _core.Tier(capacity, row_bytes, grows, state, hooks, gate, pad)
        except _core.AddressSpaceError as refused:
            raise ConfigError(
                f"{name}: no room for {capacity} rows of {row_bytes} bytes, and for {pad} more while a batch "
                f"overflows the tier: {refused}. Raise the process's limit (ulimit -v), or lower {name}"
            ) from None

    def __len__(self) -> int:
        return len(self.native)

    @property
    def rows_addr(self) -> int:
        return self.native.rows_addr

    def find(self, keys: Keys) -> Slots:
        """Slots of ``keys``, -1 where a row is not here."""
        return self.native.find(keys)

    def copy_out(self, slots: Slots, out: NDArray[np.uint8]) -> None:
        _core.copy_out(self.rows_addr, self.row_bytes, slots, out.ctypes.data)

    def copy_in(self, slots: Slots, rows: NDArray[np.uint8]) -> None:
        _core.copy_in(self.rows_addr, self.row_bytes, slots, rows.ctypes.data)

    def evict(self, pinned_since: int, plan: Any) -> int:
        """Looks for the plan's victims among rows last used before ``pinned_since``.

        Returns how many are still needed. Raises ``PolicyFaultError`` for what a policy must not do; the
        plan is to be aborted then.
        """
        try:
            return self.native.evict(pinned_since, plan)
        except _core.PolicyFault as fault:
            raise PolicyFaultError(
                f"{self.name}: policy {self.policy_name!r} broke its contract in plan {plan.now}: {fault}. "
                "All rows are as they were. cache_policies.check(policy) finds such faults; "
                "built-in policies have none"
            ) from None

    def prepare(self, plan: Any, *, use_pad: bool) -> None:
        """Takes the memory that assigning the plan's slots needs, so that assigning cannot fail.

        Raises ``TierFullError``; the plan is to be aborted then.
        """
        try:
            self.native.prepare(use_pad, plan)
        except (_core.PadFull, _core.AddressSpaceError) as refused:
            raise TierFullError(
                f"{self.name}: {refused}; raise {self.name}, or use smaller batches"
            ) from None

    def resident(self, *, only_dirty: bool = False) -> Iterator[Slots]:
        """Slots that hold rows, in order, in pieces; nothing may move meanwhile."""
        start = 0
        while len(slots := self.native.resident_slots(only_dirty, start, _PIECE)):
            yield slots
            start = int(slots[-1]) + 1

    def memory_bytes(self) -> int:
        """Bytes taken by rows, index and policy for what the tier holds now."""
        return len(self) * self.row_bytes + self.native.metadata_bytes + self.policy_bytes
