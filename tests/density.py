"""How densely tests try what can be tried at very many places: lines, bytes, combinations of settings.

CI tries every n-th place, always the same ones. ``TIERSTORE_THOROUGH=1`` tries all of them, which takes hours
(``make crash-test``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
Cases = TypeVar("Cases", bound=tuple[object, ...])
Other = TypeVar("Other")


def every(n: int) -> int:
    """Return the distance between places that are tried: ``n`` in CI."""
    return 1 if os.environ.get("TIERSTORE_THOROUGH") == "1" else n


def thinned(cases: Iterable[Cases], n: int) -> list[Cases]:
    """Return every n-th case in CI, among which every value of each parameter must be."""
    found = list(cases)
    kept = found[:: every(n)]
    for values, kept_values in zip(zip(*found, strict=True), zip(*kept, strict=True), strict=True):
        left_out = [value for value in values if value not in kept_values]
        assert not left_out, f"of every {n}th case none has {left_out[0]!r}"
    return kept


def in_turns(many: Iterable[Case], few: Iterable[Other]) -> list[tuple[Case, Other]]:
    """Return each of ``many`` with a value of ``few`` in CI, whose values take turns; else all pairs."""
    if every(2) == 1:
        return list(itertools.product(many, few))
    return list(zip(many, itertools.cycle(few)))
