"""Random operations on random modules: rows that leave memory change no bit, and torch computes the same.

``TIERSTORE_ATTACK_SEEDS`` is the number of random modules beside the fixed ones.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.in_memory import tmp_path  # noqa: F401  (a fixture: commits take no time there)
from tests.modules.module_operations import Operations

STEPS = 20
FIXED = [*range(24), 35, 46]
MORE = int(os.environ.get("TIERSTORE_ATTACK_SEEDS", "0"))


def attack(seed: int, folder: Path) -> None:
    machine = Operations(seed, folder)
    try:
        machine.run(STEPS)
    except BaseException:
        print("\n".join(machine.log))
        raise


@pytest.mark.parametrize("seed", FIXED)
def test_fixed_seeds(seed: int, tmp_path: Path) -> None:  # noqa: F811
    attack(seed, tmp_path)


@pytest.mark.skipif(not MORE, reason="TIERSTORE_ATTACK_SEEDS is not set")
@pytest.mark.timeout(600 + MORE * 5)
def test_random_seeds(tmp_path: Path) -> None:  # noqa: F811
    for number in range(MORE):
        folder = tmp_path / str(number)
        folder.mkdir()
        attack(random.randrange(1 << 32), folder)
