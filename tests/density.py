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
Other = TypeVar("Other")


def every(n: int) -> int:
    """Return the distance between places that are tried: ``n`` in CI."""
    return 1 if os.environ.get("TIERSTORE_THOROUGH") == "1" else n


def thinned(cases: Iterable[Case], n: int) -> list[Case]:
    """Return every n-th case in CI. Where cases are products, let ``n`` have no divisor in common with the
    length of a factor, so that every value of each factor comes."""
    return list(cases)[:: every(n)]


def in_turns(many: Iterable[Case], few: Iterable[Other]) -> list[tuple[Case, Other]]:
    """Return each of ``many`` with a value of ``few`` in CI, whose values take turns; else all pairs."""
    if every(2) == 1:
        return list(itertools.product(many, few))
    return list(zip(many, itertools.cycle(few)))
