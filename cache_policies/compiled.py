"""``python -m cache_policies.compiled [POLICY ...]`` fills the on-disk cache of compiled policies.

Without names it compiles all policies.
"""

from __future__ import annotations

import sys

import numpy as np

import cache_policies
from cache_policies.live import LiveCurves


def main(names: list[str]) -> None:
    for name in names or cache_policies.names():
        cache_policies.get(name).compile(16)
    LiveCurves([0]).observe(np.arange(4, dtype=np.uint64), np.arange(5, dtype=np.int32))


if __name__ == "__main__":
    main(sys.argv[1:])
