"""``python -m cache_policies NAME ...`` checks policies by name, or by ``module:Class``.

The command says what each policy does wrong, if anything; the exit status is then 1.
"""

from __future__ import annotations

import sys

from cache_policies.check import check
from cache_policies.errors import PolicyError


def main(names: list[str]) -> int:
    if not names:
        sys.stderr.write("usage: python -m cache_policies NAME or module:Class ...\n")
        return 2
    failed = 0
    for name in names:
        try:
            check(name)
            sys.stdout.write(f"{name}: keeps the contract\n")
        except PolicyError as error:
            failed = 1
            sys.stderr.write(f"{name}: {error}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
