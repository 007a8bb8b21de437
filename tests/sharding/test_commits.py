"""One commit of all ranks; restored by other ranks, plans, budgets and engines."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import TierConfig, optim
from tierstore.sharding import (
    ShardedCollection,
    ShardingEnv,
    TableSharding,
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


def build(
    env: ShardingEnv,
    cuts: dict[str, TableSharding],
    path: str | None,
    engine: str = "native",
    dtype: str = "fp32",
) -> ShardedCollection:
    whole = tierstore.EmbeddingBagCollection(
        cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05), seed=3
    )
    tiers = cases.MEMORY
    if path is not None:
        tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path, engine=engine, ssd_dtype=dtype)
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


def write_short(path: str) -> None:
    env = ShardingEnv.from_process_group()
    with build(env, CUTS, path, dtype="bf16") as collection:
        train(collection, range(5))
        collection.commit({"step": 5})
    with build(env, CUTS, path, dtype="bf16") as again:  # its rows are those of the store
        expected = contents(again)
        if env.rank == 0:
            torch.save(expected, Path(path, "expected.pt"))


def read_short(path: str, world: int, dtype: str) -> None:
    env = ShardingEnv.from_process_group()
    expected = torch.load(Path(path, "expected.pt"))
    with build(env, {1: ALONE, 4: OTHERS}[world], path, dtype=dtype) as collection:
        torch.testing.assert_close(contents(collection), expected, rtol=0, atol=0)


def closed(path: str) -> None:
    """A loop that begins at the committed step, and ends some lives by close() between two commits."""
    env = ShardingEnv.from_process_group()
    undisturbed = build(env, CUTS, None)
    train(undisturbed, range(6))
    for stop in (3, 5, 5, 6):  # step 2, 4 and 6 are committed
        collection = build(env, CUTS, path)
        done = collection.committed_extra().get("step", 0)
        for step in range(done, stop):
            train(collection, range(step, step + 1))
            if step % 2:
                collection.commit({"step": step + 1})
        assert collection.commits is not None
        number = collection.commits.number
        assert number == stop // 2
        assert (collection.commits.uncommitted() > 0) == bool(stop % 2)
        collection.close()
    collection = build(env, CUTS, path)
    assert collection.commits is not None
    assert (collection.commits.number, collection.committed_extra()) == (3, {"step": 6})
    torch.testing.assert_close(contents(collection), contents(undisturbed), rtol=0, atol=0)
    collection.close()
    for life in range(3):  # who never gives an extra has all rows
        collection = build(env, CUTS, f"{path}/without")
        assert collection.fused_optimizer.num_updates == 2 * life
        train(collection, range(2 * life, 2 * life + 2))
        collection.close()
    collection = build(env, CUTS, f"{path}/without")
    torch.testing.assert_close(contents(collection), contents(undisturbed), rtol=0, atol=0)
    collection.close()


def test_close_does_not_commit_rows_under_the_extra_of_others(tmp_path: Path) -> None:
    run(2, closed, str(tmp_path))


def test_a_commit_is_restored_by_other_ranks_plans_and_engines(tmp_path: Path) -> None:
    path = str(tmp_path)
    run(2, write, path)
    run(4, read, path, 4, "native")
    run(1, read, path, 1, "lmdb")
    assert json.loads((tmp_path / "COMMIT.json").read_text())["number"] == 4  # close() made none


def test_rows_of_fewer_bytes_are_restored_by_other_plans(tmp_path: Path) -> None:
    path = str(tmp_path)
    run(2, write_short, path)
    run(4, read_short, path, 4, "bf16")
    run(1, read_short, path, 1, "bf16")
