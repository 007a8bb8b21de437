"""The slots and bytes of memory tiers: what a slot costs, and how many slots a budget gives."""

from __future__ import annotations

import functools
import math
import resource
from collections import Counter
from typing import TypeAlias

import psutil

import cache_policies
from cache_policies.admission import Admission
from cache_policies.lanes import lane_slots
from cache_policies.policy import Policy
from tierstore import _core
from tierstore.errors import ConfigError

MIN_SLOTS = 16
_EXACT_UP_TO = 1 << 16
_MAX_OVERFLOW_ROWS = 1 << 26
_MAX_OVERFLOW_BYTES = 256 << 30  # address space is 2**47 bytes
MAX_SLOTS = (1 << 31) - _MAX_OVERFLOW_ROWS - 1
"""Slots are int32, and the overflow slots come behind the shares' slots."""


AnyPolicy: TypeAlias = str | Policy
AnyAdmission: TypeAlias = str | Admission
"""A policy or an admission filter: its name, or the object."""


def as_policy(policy: AnyPolicy) -> Policy:
    """Return the policy object of a name (an object stays as it is); ``ConfigError`` for offline ones."""
    policy = cache_policies.get(policy) if isinstance(policy, str) else policy
    if getattr(policy, "offline", False):
        raise ConfigError(
            f"policy {policy.name!r} needs the whole future of a trace, so it is for simulations only; "
            "'lookahead' uses as much of the future as training knows"
        )
    return policy


def as_admission(admission: AnyAdmission) -> Admission | None:
    """Return the admission filter of a name such as "counter(2)"; None for "always", which asks nothing."""
    filter_ = cache_policies.get_admission(admission)
    return None if filter_.name == "always" else filter_


def policy_bytes(policy: Policy | Admission | None, slots: int) -> int:
    """Return the bytes of the arrays of a policy or an admission filter (None: 0) for ``slots``, exactly
    where that is cheap."""
    if policy is None:
        return 0
    exact = getattr(policy, "state_bytes", None)
    if exact is not None and slots <= _EXACT_UP_TO:
        return int(exact(max(1, slots)))
    per_slot, fixed = _estimate(policy)
    return math.ceil(per_slot * slots + fixed)


@functools.lru_cache(maxsize=8)
def _estimate(policy: Policy | Admission) -> tuple[float, float]:
    """Return bytes per slot and fixed bytes. A policy object is measured once, since that may make large
    arrays."""
    return policy.bytes_per_slot, policy.fixed_bytes


def bytes_for(
    slots: int, row_bytes: int, policy: AnyPolicy | None, admission: AnyAdmission = "always"
) -> int:
    """Return the bytes that ``slots`` rows cost, index, policy and admission filter included."""
    chosen = None if policy is None else as_policy(policy)
    lanes, filter_ = Counter(lanes_of(slots, chosen)), as_admission(admission)
    arrays = sum(n * (policy_bytes(chosen, own) + policy_bytes(filter_, own)) for own, n in lanes.items())
    return math.ceil(slots * (row_bytes + _core.Tier.BYTES_PER_SLOT)) + arrays


def lanes_of(slots: int, policy: Policy | None) -> list[int]:
    """Return the slots of each lane; where nothing is evicted (no policy) there is one lane."""
    return [slots] if policy is None else lane_slots(slots)


def slots_for(
    budget: int, row_bytes: int, policy: AnyPolicy | None, admission: AnyAdmission = "always"
) -> int:
    """Return how many rows ``budget`` bytes hold, index, policy and admission filter included."""
    low, high = 0, min(MAX_SLOTS, budget // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for(middle, row_bytes, policy, admission) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def memory_limit() -> int:
    """Return the bytes that this process may use: the machine's memory, or half of the limit of address
    space, which code and threads use, too."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    total = int(psutil.virtual_memory().total)
    return total if limit == resource.RLIM_INFINITY else min(total, limit // 2)


def overflow_rows(row_bytes: int) -> int:
    """Return the number of overflow slots to reserve address space for: as many rows as memory could hold."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    # Where address space is limited, reserve so little that dozens of row layouts find room.
    size = memory_limit() // 64 if limited else min(memory_limit(), _MAX_OVERFLOW_BYTES)
    return max(MIN_SLOTS, min(_MAX_OVERFLOW_ROWS, size // row_bytes))
