"""Prefetch of sharded collections: the same rows, whatever is fetched ahead; no rank waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, InputError, KeyedJaggedTensor, RankError, TierConfig, optim
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
)
from tierstore.sharding.input_exchange import InputExchange

CUTS = {"t0": row_wise(), "t1": column_wise([1, 0]), "t2": data_parallel(), "t3": row_wise([10, 61])}
SECOND = {"s": row_wise([30, 27])}
TIERS = TierConfig(hbm="9KiB", ssd="64MiB", engine="memory")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sgd = optim.Adagrad(lr=0.1)
        self.bags = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY, optimizer=sgd)
        sequence = EmbeddingConfig(57, 4, "s", feature_names=["c"])
        self.rows = tierstore.EmbeddingCollection([sequence], config=cases.MEMORY, optimizer=sgd)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, rows = self.bags(features).values(), self.rows(features)["c"].values()
        return pooled.square().sum() + rows.square().sum(), pooled


def model(env: ShardingEnv, tiers: TierConfig = TIERS) -> DistributedModelParallel:
    plan = construct_plan(cases.tables(), CUTS, 2)
    second = construct_plan([EmbeddingConfig(57, 4, "s", feature_names=["c"])], SECOND, 2)
    plan = type(plan)((*plan.tables, *second.tables), 2, 2)
    return DistributedModelParallel(Model(), env, plan=plan, config=tiers)


def ahead() -> None:
    env = ShardingEnv.from_process_group()
    data = [batch.of([env.rank]) for batch in cases.batches(2, 9, empty=1)]
    ends = []
    differ: dict[str, Any] = {"depth": 1 + env.rank, "window": 3 + 2 * env.rank}
    one_auto: dict[str, Any] = {"depth": "auto", "window": 4} if env.rank else {"depth": 1}
    for options in (None, differ, one_auto, {}):
        dmp = model(env)
        on_demand = count_calls(dmp.sharded["bags"], "make_lookup")
        loader = data if options is None else tierstore.prefetch(data, dmp, **options)
        for step, features in enumerate(loader):
            dmp(features)[0].backward()
            if step == 4:  # another use of the tables while batches are on their way
                dmp.eval()
                dmp(data[0])
                dmp.train()
        ends.append(dmp.state_dict())
        assert len(on_demand) == (len(data) + 1 if options is None else 2)  # the first batch is learned from
        dmp.close()
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)
    left_early(env, data)
    pipeline(env, data, ends[0])


def count_calls(module: Any, name: str) -> list[None]:
    calls: list[None] = []
    original = getattr(module, name)

    def counted(*args: Any) -> Any:
        calls.append(None)
        return original(*args)

    setattr(module, name, counted)
    return calls


def other_ends() -> None:
    """One rank has fewer batches, or its loader fails, while the window is filled or later: none waits."""
    env = ShardingEnv.from_process_group(timeout=timedelta(seconds=60))
    data = [batch.of([env.rank]) for batch in cases.batches(2, 9)]
    for count, window in ((1, 1), (3, 4), (6, 2), (6, None)):
        for error in (None, OSError("the file is gone")):
            dmp = model(env)
            mine = data[:count] if env.rank else data
            loader = tierstore.prefetch(
                then_raise(mine, error if env.rank else None), dmp, depth=1, window=window
            )
            done: list[None] = []
            said = (
                "rank 1: has no more batches"
                if error is None
                else "rank 1: its loader raised OSError: the file is gone"
            )
            start = time.monotonic()
            if error is not None and env.rank:
                with pytest.raises(OSError, match="the file is gone"):
                    train(dmp, loader, done)
            else:
                with pytest.raises(RankError, match=said):
                    train(dmp, loader, done)
            assert len(done) == count
            assert time.monotonic() - start < 20
            dmp(data[0])[0].backward()  # and the ranks are together
            dmp.close()


def then_raise(data: list[KeyedJaggedTensor], error: Exception | None) -> Iterator[KeyedJaggedTensor]:
    yield from data
    if error is not None:
        raise error


def train(
    dmp: DistributedModelParallel, loader: Iterable[KeyedJaggedTensor], done: list[None] | None = None
) -> None:
    for features in loader:
        dmp(features)[0].backward()
        if done is not None:
            done.append(None)


def one_changes_its_ids() -> None:
    """A rank that does not look up what was fetched ahead is named at once."""
    # Torch's groups are closed after the timeout, since gloo waits for the exchange that no rank joins.
    env = ShardingEnv.from_process_group(timeout=timedelta(seconds=8))
    data = [batch.of([0]) for batch in cases.batches(2, 9)]
    dmp, done = model(env), 0

    def steps() -> None:
        nonlocal done
        for features in tierstore.prefetch(data, dmp, depth=1, window=2):
            if env.rank and done == 3:
                features.values().copy_(features.values().flip(0) % 50)
            dmp(features)[0].backward()
            done += 1

    with pytest.raises(RankError, match=r"rank [01] waits in the exchange of .*, and rank [01] in the"):
        steps()
    assert done == 3
    dmp.close(commit=False)


def one_looks_up_on_demand() -> None:
    """Nor do ranks take one batch for another."""
    env = ShardingEnv.from_process_group(timeout=timedelta(seconds=60))
    dmp, features = model(env), cases.batches(2, 1)[0].of([env.rank])
    bags: Any = dmp.sharded["bags"]
    call = bags.make_lookup if env.rank else lambda features: bags.begin_exchange(features).send()
    for one in (call, dmp):
        with pytest.raises(RankError, match="ranks 0 look a batch up ahead, and ranks 1 in a forward call"):
            one(features)
    dmp.close(commit=False)


def left_early(env: ShardingEnv, data: list[KeyedJaggedTensor]) -> None:
    dmp = model(env)
    for step, features in enumerate(tierstore.prefetch(data, dmp, depth=1, window=4)):
        dmp(features)[0].backward()
        if step == 2:
            break
    wrong = [*data[:3], data[3], *data[4:]]
    if env.rank:
        bad = data[4].values().clone()
        bad[:1] = -7
        wrong[4] = KeyedJaggedTensor(data[4].keys(), bad, lengths=data[4].lengths())
    with pytest.raises(InputError, match="rank 1: feature 'c': id -7 at position 0"):
        train(dmp, tierstore.prefetch(wrong, dmp, depth=2, window=2))
    dmp.close()


def empty_on_one_rank() -> None:
    """Rank 1 has no examples: its batches have no memory, and are not taken for one another."""
    env = ShardingEnv.from_process_group()
    data = [batch.of([env.rank]) for batch in cases.batches(2, 13)[1::2]]
    nothing = torch.zeros(0, dtype=torch.int64)
    if env.rank:
        data = [KeyedJaggedTensor(batch.keys(), nothing.clone(), lengths=nothing.clone()) for batch in data]
    *data, other = data
    dmp = model(env)
    for features in tierstore.prefetch(data, dmp, depth=1, window=1):
        with torch.no_grad():
            dmp(other)
        dmp(features)[0].backward()
    dmp.close()


def pipeline(env: ShardingEnv, data: list[KeyedJaggedTensor], expected: dict[str, torch.Tensor]) -> None:
    dmp = model(env)
    steps = tierstore.PrefetchPipeline(dmp, None, depth=1, window=2)
    source = iter(data)
    for _ in data:
        steps.progress(source)
    with pytest.raises(StopIteration):
        steps.progress(source)
    torch.testing.assert_close(dmp.state_dict(), expected, rtol=0, atol=0)
    dmp.close()


def stages() -> None:
    """While batch i computes, i+1 is planned and fetched, and the ids of i+2 and sizes of i+3 are exchanged
    (with a window of 1)."""
    env = ShardingEnv.from_process_group()
    data = [batch.of([env.rank]) for batch in cases.batches(2, 9)]
    dmp = model(env, TierConfig(hbm="64KiB", ssd="64MiB", engine="memory"))
    bags = dmp.sharded["bags"]
    begun: list[InputExchange] = []
    original = bags.lookups.begin

    def begin(features: Any, ahead: bool = True) -> InputExchange:
        begun.append(original(features, ahead))
        return begun[-1]

    bags.lookups.begin = begin  # type: ignore[method-assign]
    for step, features in enumerate(tierstore.prefetch(data, dmp, depth=1, window=1)):
        loss = dmp(features)[0]
        if 0 < step < 5:  # nothing but the other threads works now
            until(lambda step=step: hasattr(begun[step + 2], "arrived"))
            until(lambda step=step: planned_ahead(bags, 1))
            assert len(begun) == step + 4
        loss.backward()
    dmp.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def planned_ahead(module: Any, batches: int) -> bool:
    """Whether the rows of so many later batches are in the fast tier, pinned."""
    group = module.engine.groups[0]
    return group._planned >= group.order.oldest_in_use(1 << 60) + batches


def test_exchange_fetch_and_compute_overlap() -> None:
    run(2, stages)


def test_prefetch_changes_nothing() -> None:
    run(2, ahead)


def test_a_rank_that_looks_another_batch_up_than_was_fetched_is_named() -> None:
    run(2, one_changes_its_ids)
    run(2, one_looks_up_on_demand)


def test_batches_end_earlier_on_one_rank() -> None:
    run(2, other_ends)


def test_a_rank_without_examples_finds_the_lookups_that_the_others_find() -> None:
    run(2, empty_on_one_rank)
