"""Admission filters: which missed rows get a slot at all.

A row that is not admitted uses a transient overflow slot and is written through, so it displaces no row. A
filter is a ``Hooked`` whose one hook ``admit`` is called before the policy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cache_policies.errors import PolicyError
from cache_policies.hashing import mix
from cache_policies.inner import inlined
from cache_policies.policy import Hooked


class Admission(Hooked):
    """Base class of admission filters."""

    kind = "admission filter"

    @classmethod
    def hook_names(cls) -> list[str]:
        return ["admit"]

    @staticmethod
    def admit(s: Any, keys: Any, now: Any, admitted: Any) -> None:
        """Clear ``admitted[i]`` (uint8, 1) to refuse ``keys[i]`` (uint64), a row that plan ``now`` lacks."""


class Always(Admission):
    """Admits every row (the simulator and the engine do not call it)."""

    name = "always"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return {"unused": np.zeros(1, np.uint8)}


@inlined
def _place(hash_, row, size):
    """Return where one of several hashes of a key points to in ``size`` places."""
    word = (hash_ * np.uint64(2 * row + 1) + (hash_ >> np.uint64(32))) >> np.uint64(32)
    return np.int64((word * np.uint64(size)) >> np.uint64(32))


class Counter(Admission):
    """Admits a row at its ``n``-th miss (2 to 255) since the last decay.

    Misses are counted in a count-min sketch (Cormode, Muthukrishnan, 2005) of two rows of bytes, as many as
    slots; collisions admit early, never late. All counts are halved after ten misses per slot.
    """

    name = "counter"

    def __init__(self, n: int = 2) -> None:
        if not 2 <= n <= 255:
            raise PolicyError(f"counter(n): n must be 2 to 255, got {n}")
        self.n = n

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return {
            "counts": np.zeros(8 * capacity, np.uint8),
            "needed": np.array([self.n], np.int64),
            "misses": np.zeros(1, np.int64),
        }

    @staticmethod
    def admit(s, keys, now, admitted):
        width = s.counts.size // 2
        for i in range(keys.size):
            hash_ = mix(keys[i])
            minimum = 255
            for row in range(2):
                at = row * width + _place(hash_, row, width)
                s.counts[at] = min(255, s.counts[at] + 1)
                minimum = min(minimum, s.counts[at])
            if minimum < s.needed[0]:
                admitted[i] = 0
        s.misses[0] += keys.size
        if s.misses[0] >= width:
            s.misses[0] = 0
            for at in range(s.counts.size):
                s.counts[at] >>= 1

    def __repr__(self) -> str:
        return f"Counter({self.n})"


class Bloom(Admission):
    """Admits a row that was missed before, within about the last ``n`` to ``2 n`` misses (default: ten per
    slot).

    Two Bloom filters (Bloom, 1970) of eight bits per expected miss and four hashes; when the younger one has
    taken ``n`` misses, the older is emptied and takes its place.
    """

    name = "bloom"

    def __init__(self, n: int = 0) -> None:
        if n < 0:
            raise PolicyError(f"bloom(n): n must be positive (or 0: ten per slot), got {n}")
        self.n = n

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        n = self.n or 10 * capacity
        return {
            "old": np.zeros(n, np.uint8),
            "young": np.zeros(n, np.uint8),
            "misses": np.zeros(1, np.int64),
        }

    @staticmethod
    def admit(s, keys, now, admitted):
        for i in range(keys.size):
            hash_ = mix(keys[i])
            in_old, in_young = True, True
            for row in range(4):
                bit = _place(hash_, row, 8 * s.young.size)
                mask = np.uint8(1 << (bit & 7))
                in_old &= s.old[bit >> 3] & mask != 0
                in_young &= s.young[bit >> 3] & mask != 0
                s.young[bit >> 3] |= mask
            if not (in_old or in_young):
                admitted[i] = 0
            s.misses[0] += not in_young
            if s.misses[0] >= s.young.size:
                s.misses[0] = 0
                s.old[:] = s.young
                s.young[:] = 0

    def __repr__(self) -> str:
        return f"Bloom({self.n})"


_FILTERS: dict[str, type[Admission]] = {"always": Always, "counter": Counter, "bloom": Bloom}


def get_admission(admission: str | Admission) -> Admission:
    """Return the filter of a name such as ``always``, ``bloom``, ``counter(3)``; pass a filter through."""
    if isinstance(admission, Admission):
        return admission
    if not isinstance(admission, str):
        raise PolicyError(f"{admission!r} is neither the name of an admission filter nor one")
    name, _, argument = admission.partition("(")
    argument = argument.rstrip(")")
    if name not in _FILTERS or (argument and not argument.isdecimal()):
        raise PolicyError(f"unknown admission filter {admission!r}; known: always, counter(n), bloom(n)")
    if name == "always":
        return Always()
    return _FILTERS[name](int(argument)) if argument else _FILTERS[name]()  # type: ignore[call-arg]
