"""``python -m cache_policies.compiled [POLICY ...]`` fills the on-disk cache of compiled policies.

Without names it compiles all policies.
"""

from __future__ import annotations

import sys

import cache_policies
from cache_policies.live import load


def main(names: list[str]) -> None:
    for name in names or cache_policies.names():
        cache_policies.get(name).compile(16)
    load()


if __name__ == "__main__":
    main(sys.argv[1:])
