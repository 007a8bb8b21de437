"""A test on ranks leaves no threads of its process groups to the tests after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.cuda.fake_nccl import on_gpus
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore.sharding import ShardingEnv, construct_plan, row_wise, shard

_OF_A_GROUP = 3
_before: dict[str, int] = {}


def gloo_threads() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def note_threads() -> None:
    _before["threads"] = gloo_threads()
    assert _before["threads"] > 0


def leave_a_collection() -> None:
    """The collection is in a cycle, and has groups."""
    whole = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY)
    plan = construct_plan(whole, {table.name: row_wise() for table in cases.tables()}, 2)
    parts = shard(whole, plan, ShardingEnv.from_process_group(), config=cases.MEMORY)
    parts.close()
    parts.cycle = [parts]
    assert gloo_threads() >= _before["threads"] + _OF_A_GROUP


def leave_groups_of_gpus() -> None:
    with on_gpus():
        env = ShardingEnv.from_process_group()
        env.gpus.cycle = env, env.gpus.of("vectors")  # type: ignore[attr-defined]
    assert gloo_threads() >= _before["threads"] + _OF_A_GROUP


def compare_threads() -> None:
    """Those of the job's own group may have begun since they were counted."""
    assert gloo_threads() < _before["threads"] + _OF_A_GROUP


@pytest.mark.parametrize("leave", [leave_a_collection, leave_groups_of_gpus])
def test_groups_end_with_their_test(leave: Callable[[], None]) -> None:
    run(2, note_threads)
    run(2, leave)
    run(2, compare_threads)
