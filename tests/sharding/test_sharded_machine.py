"""Random operations on sharded collections: neither the tiers nor the plan change what training computes.

``TIERSTORE_ATTACK_SEEDS=1000:1300`` adds the random collections of these seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sharding.ranks import run
from tests.sharding.sharded_operations import ShardedOperations

STEPS = 16
WORLDS = ((2,), (2,), (1,), (2,), (3,), (2, 3), (2,), (3, 1))
"""Numbers of ranks, of which each goes on from the commit of those before."""
FIXED = (5, 6, 7)  # on one to three ranks, and on other ranks than those before
MORE = range(*map(int, os.environ.get("TIERSTORE_ATTACK_SEEDS", "0:0").split(":")))


def operate(seed: int, folder: str, first: int, steps: int) -> None:
    machine = ShardedOperations(seed, Path(folder))
    try:
        machine.run(steps, first)
    except BaseException as error:
        raise AssertionError("\n".join(machine.log)) from error


@pytest.mark.parametrize("seed", [*FIXED, *MORE])
def test_rows_of_ranks_are_the_rows_of_one_process(seed: int, tmp_path: Path) -> None:
    worlds = WORLDS[seed % len(WORLDS)]
    steps = STEPS // len(worlds)
    for number, world in enumerate(worlds):
        run(world, operate, seed, str(tmp_path), number * steps, steps)
