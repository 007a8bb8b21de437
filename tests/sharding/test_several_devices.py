"""Ranks whose stores are spread over two paths each: commits, resumed trainings, other plans, a lost path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sharding.ranks import run
from tests.sharding.test_resume import build, contents, resumes, train
from tierstore import ConfigError
from tierstore.sharding import ShardingEnv


def test_a_resumed_training(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("nvme0", "nvme1")]
    run(2, resumes, paths, "bags", 1)
    (first,), (second,) = (list(Path(path).glob("*-*")) for path in paths)
    assert [path.name for path in second.rglob("TIERSTORE-DEVICE.json")] == ["TIERSTORE-DEVICE.json"]
    assert len(list(second.rglob("*.seg"))) == len(list(first.rglob("*.seg"))) > 0
    assert not list(second.rglob("MANIFEST"))


def changes_plan_and_paths(paths: list[str]) -> None:
    env = ShardingEnv.from_process_group()
    never_closed = build(env, "bags", 0, None)
    train(never_closed, range(4))
    for holder, of, step in (
        (0, paths[:1], 1),
        (1, paths[:2], 2),
        (0, paths, 3),
        (0, [paths[0], *paths[:0:-1]], 4),
    ):
        collection = build(env, "bags", holder, of)
        train(collection, range(step - 1, step))
        collection.commit({"step": step})
        collection.close()
    collection = build(env, "bags", 0, paths)
    torch.testing.assert_close(contents(collection), contents(never_closed), rtol=0, atol=0)
    collection.close()
    with pytest.raises(ConfigError, match=r"device 2 \(last at .*nvme2"):
        build(env, "bags", 0, paths[:2])
    never_closed.close()


def test_another_plan_and_more_paths(tmp_path: Path) -> None:
    run(2, changes_plan_and_paths, [str(tmp_path / f"nvme{i}") for i in range(3)])
