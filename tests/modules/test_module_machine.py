"""Random operations on random modules: rows that leave memory change no bit, and torch computes the same.

``TIERSTORE_ATTACK_SEEDS=1000:1300`` adds the random modules of these seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.in_memory import tmp_path  # noqa: F401  (a fixture: commits take no time there)
from tests.modules.module_operations import Operations

STEPS = 20
FIXED = [*range(24), 35, 46, 1183]  # the last three find faults that the others do not
MORE = range(*map(int, os.environ.get("TIERSTORE_ATTACK_SEEDS", "0:0").split(":")))


@pytest.mark.parametrize("seed", [*FIXED, *MORE])
def test_rows_in_tiers_are_the_rows_in_memory(seed: int, tmp_path: Path) -> None:  # noqa: F811
    machine = Operations(seed, tmp_path)
    try:
        machine.run(STEPS)
    except BaseException:
        print("\n".join(machine.log))
        raise
