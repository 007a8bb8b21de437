"""One commit of all ranks; restored by other ranks, plans, budgets and engines; ranks killed in between."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import TierConfig, optim
from tierstore.sharding import (
    Cut,
    ShardedCollection,
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    shard,
    table_wise,
)

CUTS = {
    "t0": row_wise([13, 37]),
    "t1": column_wise([1, 0], [3, 7]),
    "t2": data_parallel(),
    "t3": table_wise(1),
}
OTHERS = {"t0": column_wise([0, 1, 3]), "t1": row_wise(), "t2": table_wise(2), "t3": data_parallel()}
ALONE = dict.fromkeys(CUTS, table_wise(0))


def build(env: ShardingEnv, cuts: dict[str, Cut], path: str, engine: str = "native") -> ShardedCollection:
    whole = tierstore.EmbeddingBagCollection(
        cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05), seed=3
    )
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path, engine=engine)
    return shard(whole, construct_plan(whole, cuts, env.world_size), env, config=tiers)


def train(collection: ShardedCollection, steps: range) -> None:
    for batch in cases.batches(2, 9, longest=1)[steps.start : steps.stop]:
        collection(batch.of([collection.env.rank])).values().sum().backward()


def contents(collection: ShardedCollection) -> dict[str, torch.Tensor]:
    found = dict(collection.state_dict())
    for table in collection.configs:
        state = collection.optimizer_rows(torch.arange(table.num_embeddings), table.name)
        found |= {f"{table.name}.{name}": value for name, value in state.items()}
    return found


def write(path: str) -> None:
    env = ShardingEnv.from_process_group()
    collection = build(env, CUTS, path)
    train(collection, range(3))
    assert collection.commit({"step": 3}) == 1
    expected = contents(collection)
    train(collection, range(3, 5))  # not committed
    collection.engine.commit()  # as if a crash had come between this and the other ranks
    collection.close(commit=False)
    again = build(env, CUTS, path)
    assert again.committed_extra() == {"step": 3}
    torch.testing.assert_close(contents(again), expected, rtol=0, atol=0)
    assert again.fused_optimizer.num_updates == 3
    train(again, range(3, 5))
    again.commit({"step": 5})
    if env.rank == 0:
        torch.save(contents(again), Path(path, "expected.pt"))
    else:
        contents(again)
    again.close(commit=False)


def read(path: str, world: int, engine: str) -> None:
    env = ShardingEnv.from_process_group()
    collection = build(env, {1: ALONE, 4: OTHERS}[world], path, engine)
    expected = torch.load(Path(path, "expected.pt"))
    torch.testing.assert_close(contents(collection), expected, rtol=0, atol=0)
    assert collection.committed_extra() == {"step": 5}
    assert collection.fused_optimizer.num_updates == 5
    collection.commit({"step": 5})
    collection.close()


def test_a_commit_is_restored_by_other_ranks_plans_and_engines(tmp_path: Path) -> None:
    path = str(tmp_path)
    run(2, write, path)
    run(4, read, path, 4, "native")
    run(1, read, path, 1, "lmdb")
    assert json.loads((tmp_path / "COMMIT.json").read_text())["number"] == 6  # two of each job


def killed(rank: int, store: str, path: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    env = ShardingEnv.from_process_group()
    collection = build(env, CUTS, path)
    done = collection.committed_extra().get("step", 0)
    for step in range(done, 4):
        train(collection, range(step, step + 1))
        if rank == 1 and step == 2 and not done:
            collection.engine.commit({"commit": 99})
            os.kill(os.getpid(), signal.SIGKILL)
        collection.commit({"step": step + 1})
    if rank == 0:
        torch.save(contents(collection), Path(path, "expected.pt"))
    else:
        contents(collection)
    collection.close(commit=False)


def test_a_killed_rank_leaves_the_last_commit_of_all(tmp_path: Path) -> None:
    for attempt in range(2):
        arguments = (str(tmp_path / f"store{attempt}"), str(tmp_path / "tables"))
        context = mp.start_processes(killed, arguments, 2, join=False, start_method="forkserver")
        if attempt == 0:
            with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
                context.join()
            record = json.loads((tmp_path / "tables/COMMIT.json").read_text())
            assert record["extra"] == {"step": 2}
            continue
        context.join()
    killed_once = torch.load(tmp_path / "tables/expected.pt")
    run(2, uninterrupted, str(tmp_path / "other"), killed_once)


def uninterrupted(path: str, expected: dict[str, torch.Tensor]) -> None:
    collection = build(ShardingEnv.from_process_group(), CUTS, path)
    train(collection, range(4))
    torch.testing.assert_close(contents(collection), expected, rtol=0, atol=0)
    collection.close(commit=False)
