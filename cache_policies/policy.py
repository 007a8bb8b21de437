"""Defines a policy: flat arrays and hooks, written in plain Python and compiled by numba.

A policy class gives its arrays in ``state`` and defines the hooks as static methods whose first argument
``s`` is a named tuple of these arrays. The live engine and the simulator call the same compiled hooks through
C function pointers (``docs/design.md``, "Policy contract"); the order of calls within one plan is
``announce``, ``touch``, ``admit``, ``evict``, ``insert``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cache_policies.errors import PolicyError

if TYPE_CHECKING:
    from cache_policies.native import Compiled

#: ``next_use`` of a row that no known batch uses.
UNKNOWN = np.iinfo(np.int64).max

# Slots of the arrays that are measured: arrays of tens of MiB, once freed, would raise the size from which
# glibc's malloc maps blocks on their own, for the whole process.
_MEASURED = 1 << 17
_REQUIRED = ("state", "insert", "remove", "evict")
_MAX_CAPACITY = 2**31 - 2**18  # slots and list sentinels are int32


class Hooked:
    """Base of policies and admission filters: arrays, and the hooks that work on them.

    Hooks are static methods in the subset of Python that numba compiles. Arrays never grow; single numbers
    live in arrays of length 1.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "policy"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        """Return the arrays (1-d, C-contiguous) for slots ``0 .. capacity-1``, all of them empty."""
        raise NotImplementedError(f"{self.kind} {self.name!r} defines no state(capacity)")

    @classmethod
    def hook_names(cls) -> list[str]:
        """Return the names of the hooks that the engine is given."""
        raise NotImplementedError

    def state_bytes(self, capacity: int) -> int:
        """Return the exact bytes of the arrays for ``capacity`` slots."""
        return sum(array.nbytes for array in self.state(capacity).values())

    @property
    def bytes_per_slot(self) -> float:
        """Return the bytes of state that one more slot costs, measured on the arrays of large capacities."""
        low, high = _MEASURED, 2 * _MEASURED
        return (self.state_bytes(high) - self.state_bytes(low)) / (high - low)

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of state beside ``bytes_per_slot``, rounded up; small capacities may cost less."""
        capacity = _MEASURED
        return 256 + max(0, int(self.state_bytes(capacity) - self.bytes_per_slot * capacity))

    def compile(self, capacity: int) -> Compiled:
        """Allocate the state for ``capacity`` slots and compile the hooks (cached on disk where possible)."""
        from cache_policies.native import Compiled

        if not 1 <= capacity <= _MAX_CAPACITY:
            raise PolicyError(
                f"{self.kind} {self.name!r}: capacity must be 1 to {_MAX_CAPACITY} slots, got {capacity}"
            )
        return Compiled(self, int(capacity))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Policy(Hooked):
    """Base class of eviction policies.

    Subclasses set ``name``, return their arrays from ``state`` and define ``insert``, ``remove`` and
    ``evict``, mostly ``touch``, and ``announce`` if ``uses_window``. ``now``, ``next_use`` and ``last_use``
    are int64 sequence numbers that grow without bound; a slot's ``last_use`` changes only together with
    ``touch`` or ``insert``.
    """

    uses_window: ClassVar[bool] = False
    #: Offline policies need the future of the whole trace: they run in the simulator only.
    offline: ClassVar[bool] = False

    @classmethod
    def hook_names(cls) -> list[str]:
        optional = [] if cls.admit is Policy.admit else ["admit"]
        return ["touch", "insert", "announce", "remove", "evict", *optional]

    @classmethod
    def check_complete(cls) -> None:
        """Raise PolicyError unless the class has a name, and everything that a policy must define."""
        if not cls.name:
            raise PolicyError(f"{cls.__name__}.name is empty; name the policy")
        missing = [name for name in _REQUIRED if getattr(cls, name) is getattr(Policy, name)]
        if cls.uses_window and cls.announce is Policy.announce:
            missing.append("announce")
        if missing:
            raise PolicyError(
                f"policy {cls.name!r} defines no {', no '.join(missing)}; docs/how-to/policy.md has the hooks"
            )

    @staticmethod
    def touch(s: Any, slots: Any, keys: Any, next_use: Any, now: Any) -> None:
        """Note that plan ``now`` uses the resident ``slots`` (int32, each once).

        ``keys`` is uint64 and ``next_use`` int64, one per slot.
        """

    @staticmethod
    def insert(s: Any, slots: Any, keys: Any, next_use: Any, now: Any) -> None:
        """Note that ``slots`` were given to rows that were not resident; arguments as for ``touch``."""

    @staticmethod
    def announce(s: Any, slots: Any, next_use: Any, now: Any) -> None:
        """Note when resident ``slots`` are used next (``UNKNOWN``: the known use was called off)."""

    @staticmethod
    def remove(s: Any, slots: Any) -> None:
        """Note that ``slots`` were emptied other than by ``evict``."""

    @staticmethod
    def evict(s: Any, n: Any, last_use: Any, pinned_since: Any, victims: Any) -> Any:
        """Write up to ``n`` victims to ``victims``, drop them from the state and return how many.

        A victim is a slot with ``last_use[slot] < pinned_since``. There are fewer than ``n`` only if no other
        unpinned slot is resident.
        """
        return 0

    @staticmethod
    def admit(s: Any, keys: Any, now: Any, admitted: Any) -> None:
        """Refuse rows a slot: plan ``now`` lacks the rows ``keys``. Called before ``evict``, if defined.

        Clearing ``admitted[i]`` (uint8; 1, or 0 if a filter refused the row before) refuses row ``i`` a slot.
        """
