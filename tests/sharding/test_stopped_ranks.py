"""One rank fails and closes its tables: the others hear of it where they wait, and nothing is committed.

The rank that fails stays alive, so that the others learn nothing from its sockets, and the timeout of the
groups is longer than a test may take.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.density import in_turns
from tests.sharding import cases, resumed
from tests.sharding.ranks import run as run_on_ranks
from tierstore import KeyedJaggedTensor, TierConfig
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    construct_plan,
    row_wise,
)

TIMEOUT = timedelta(minutes=10)
_LONG_S = 40
"""What no wait may take, however busy the machine is."""
LOOK_AGAIN_S = 0.2
STEPS = 4
FAILS_AT = 2
"""The step in which rank 1 fails; one step is committed. DDP has waits of its own in the one before."""


def in_haste(function: Callable[..., None], *args: Any) -> None:
    with mock.patch("tierstore.sharding.peers._LOOK_AGAIN", timedelta(seconds=LOOK_AGAIN_S)):
        function(*args)


def run(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """On ranks that look more often than usual whether another rank has stopped."""
    run_on_ranks(world_size, in_haste, function, *args)


class Boom(Exception):
    pass


class Optimizer(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise Boom("boom")
        return super().step(closure)


def fail(*_: Any, **__: Any) -> Any:
    raise Boom("boom")


def batches(rank: int, place: str) -> Iterator[KeyedJaggedTensor]:
    for step, batch in enumerate(cases.batches(2, STEPS, longest=1)):
        if rank == 1 and step == FAILS_AT and place == "loader":
            raise Boom("boom")
        yield batch.of([rank])


def train(dmp: DistributedModelParallel, place: str, extra: bool, ahead: bool) -> None:
    rank = dist.get_rank()
    optimizer = Optimizer(dmp.parameters(), lr=0.1)
    loader: Any = batches(rank, place)
    if ahead:
        loader = tierstore.prefetch(loader, dmp, depth=1, window=1)
    for step, features in enumerate(loader):
        fails = rank == 1 and step == FAILS_AT
        if fails and place == "before forward":
            fail()
        if fails and place == "in forward":  # the dense part, after the rows were exchanged
            dmp.module.over.forward = fail
        if fails and place == "in the lookup":  # after the ids were exchanged
            dmp.module.sparse.lookups.local_output = fail
        optimizer.zero_grad()
        loss = dmp(features).square().sum()
        if fails and place == "between forward and backward":
            fail()
        if fails and place == "in backward":
            loss.register_hook(fail)
        loss.backward()
        optimizer.fails = fails and place == "in the optimizer"
        optimizer.step()
        if step == 0:
            dmp.commit({"step": 1} if extra else None)
        if fails and place == "after the last step":
            fail()
        if place == "after the last step" and step == FAILS_AT:
            return


def close_in_finally(dmp: DistributedModelParallel, *how: Any) -> None:
    try:
        train(dmp, *how)
    finally:
        dmp.close()


def close_in_except(dmp: DistributedModelParallel, *how: Any) -> None:
    try:
        train(dmp, *how)
    except BaseException:
        dmp.close()
        raise
    dmp.close()


def close_by_with(dmp: DistributedModelParallel, *how: Any) -> None:
    with dmp:
        train(dmp, *how)


def stopped(folder: Path, close: Callable[..., None], place: str, extra: bool, ahead: bool) -> None:
    """Ends without a word to the test, which reads what the ranks leave in ``folder``."""
    env = ShardingEnv.from_process_group(timeout=TIMEOUT)
    model = resumed.Model()
    plan = construct_plan(model.sparse, resumed.CUTS, 2, name="sparse")
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=str(folder / "tables"))
    dmp = DistributedModelParallel(model, env, plan=plan, config=tiers)
    start = time.monotonic()
    try:
        close(dmp, place, extra, ahead)
        found = "nothing"
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    leave(folder, start, found, not dmp.sharded["sparse"].engine.closed)


def leave(folder: Path, start: float, found: str, open_still: bool) -> None:
    """Tells the test what this rank has met, waits until the other one has, too, and ends the process."""
    rank = dist.get_rank()
    told = json.dumps([found, open_still, time.monotonic() - start])
    (folder / f"{rank}.new").write_text(told)
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")
    while not all((folder / f"{other}.json").exists() for other in range(2)):
        if time.monotonic() > start + 2 * _LONG_S:
            break
        time.sleep(0.05)
    os._exit(0)


PLACES = [
    "loader",
    "before forward",
    "in the lookup",
    "in forward",
    "between forward and backward",
    "in backward",
    "after the last step",  # where all would commit in close(), for the last commit has no extra
    "in the optimizer",
]


@pytest.mark.parametrize(("place", "ahead"), in_turns(PLACES, [False, True]))
def test_the_others_hear_of_it(tmp_path: Path, place: str, ahead: bool) -> None:
    number = PLACES.index(place)
    has_extra = bool(number % 2)
    close = [close_in_finally, close_by_with, close_in_except][number % 3]
    with pytest.raises(AssertionError, match="it died"):
        run(2, stopped, tmp_path, close, place, has_extra, ahead)
    for rank in range(2):
        found, open_still, took = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not open_still
        assert took < _LONG_S, f"rank {rank} waited {took} s"
        if rank == 1:
            assert found == "Boom: boom"
        elif place == "loader" and ahead:
            assert found.startswith("RankError: rank 1: its loader raised Boom: boom")
        else:
            assert found.startswith("RankError: rank 1 has stopped after Boom: boom. Nothing of this step")
    record = json.loads((tmp_path / "tables" / "COMMIT.json").read_text())
    assert (record["number"], record["extra"]) == (1, {"step": 1} if has_extra else {})


def close_never(dmp: DistributedModelParallel, *how: Any) -> None:
    train(dmp, *how)


def test_the_others_hear_of_a_lookup_that_failed_though_nobody_closes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="it died"):
        run(2, stopped, tmp_path, close_never, "in the lookup", False, False)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0][0].startswith("RankError: rank 1 has stopped after Boom: boom. Nothing of this step")
    assert told[1][0] == "Boom: boom"
    assert max(took for *_, took in told) < _LONG_S


def stopped_early(folder: Path, buffers: bool) -> None:
    """Rank 1 fails where DDP broadcasts, before any lookup: the order of gradients, or buffers."""
    model = resumed.Model()
    if buffers:
        model.over.register_buffer("of_over", torch.zeros(3))
    plan = construct_plan(model.sparse, resumed.CUTS, 2, name="sparse")
    env = ShardingEnv.from_process_group(dist.new_group(timeout=TIMEOUT))
    dmp = DistributedModelParallel(model, env, plan=plan, config=TierConfig(hbm="24KiB", ssd="64MiB"))
    start, found = time.monotonic(), "nothing"
    try:
        for step, batch in enumerate(cases.batches(2, STEPS, longest=1)):
            if dist.get_rank() and step == 1 + 2 * buffers:
                fail()
            dmp(batch.of([dist.get_rank()])).square().sum().backward()
    except BaseException as error:
        dmp.close()
        found = f"{type(error).__name__}: {error}"
    leave(folder, start, found, not dmp.sharded["sparse"].engine.closed)


@pytest.mark.parametrize("buffers", [False, True])
def test_the_others_hear_of_it_where_ddp_broadcasts(tmp_path: Path, buffers: bool) -> None:
    with pytest.raises(AssertionError, match="it died"):
        run(2, stopped_early, tmp_path, buffers)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0][0].startswith("RankError: rank 1 has stopped after Boom: boom. Nothing of this step")
    assert told[1][0] == "Boom: boom"
    assert max(took for *_, took in told) < _LONG_S


# -- ranks that do different things ----------------------------------------------------------


def differently(folder: Path, what: str) -> None:
    """Rank 1 leaves the loop early, or commits where the other one does not. Both stay alive."""
    rank = dist.get_rank()
    env = ShardingEnv.from_process_group(timeout=TIMEOUT)
    model = resumed.Model()
    plan = construct_plan(model.sparse, resumed.CUTS, 2, name="sparse")
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=str(folder / "tables"))
    dmp = DistributedModelParallel(model, env, plan=plan, config=tiers)
    start = time.monotonic()
    found = "nothing"
    try:
        for step, batch in enumerate(cases.batches(2, STEPS, longest=1)):
            odd = rank == 1 and step == FAILS_AT
            if odd and what == "fewer batches":
                break
            loss = dmp(batch.of([rank])).square().sum()
            if odd and what == "no backward":
                break
            loss.backward()
            if odd and what == "another commit":
                dmp.commit({"step": step})
            if odd and what == "reads rows":
                dmp.sharded["sparse"].rows([3], "t0")
            if step == 0:
                dmp.commit()
        dmp.close()
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
        dmp.close()
    leave(folder, start, found, not dmp.sharded["sparse"].engine.closed)


@pytest.mark.parametrize("what", ["fewer batches", "no backward", "another commit", "reads rows"])
def test_ranks_that_wait_for_one_another(tmp_path: Path, what: str) -> None:
    with pytest.raises(AssertionError, match="it died"):
        run(2, differently, tmp_path, what)
    for rank in range(2):
        found, open_still, took = json.loads((tmp_path / f"{rank}.json").read_text())
        assert not open_still
        assert took < _LONG_S, f"rank {rank} waited {took} s"
        assert found.startswith("RankError: rank ")
        assert "all ranks must make as many steps" in found
    record = json.loads((tmp_path / "tables" / "COMMIT.json").read_text())
    assert (record["number"], record["extra"]) == (1, {})


def slowly(path: str, ahead: bool) -> None:
    """Ranks that do the same, but each is late somewhere in every step."""
    rank = dist.get_rank()
    late = random.Random(rank)
    model = resumed.Model()
    cuts = resumed.CUTS | {"t0": row_wise(), "t1": column_wise([2, 0])}
    plan = construct_plan(model.sparse, cuts, 3, name="sparse")
    dmp = DistributedModelParallel(
        model, plan=plan, config=TierConfig(hbm="24KiB", ssd="64MiB", path=path, check_gradients=True)
    )
    loader: Any = (batch.of([rank]) for batch in cases.batches(3, 3, longest=1))
    if ahead:
        loader = tierstore.prefetch(loader, dmp, depth=1, window=1)
    for step, features in enumerate(loader):
        at = late.randrange(5)
        wait = [(LOOK_AGAIN_S + 0.3) * (place == at) for place in range(5)]
        time.sleep(wait[0])
        loss = dmp(features).square().sum()
        time.sleep(wait[1])
        loss.backward()
        time.sleep(wait[2])
        dmp.commit({"step": step})
        time.sleep(wait[3])
        dmp.sharded["sparse"].rows([3], "t0")
        time.sleep(wait[4])
    dmp.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_that_are_late_are_waited_for(tmp_path: Path, ahead: bool) -> None:
    run(3, slowly, str(tmp_path), ahead)


# -- what is an error, and what is not -------------------------------------------------------


def begin_again(path: str) -> None:
    """All ranks fail alike, close, and go on with new tables in the same processes."""
    model = resumed.Model()
    plan = construct_plan(model.sparse, resumed.CUTS, 2, name="sparse")
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path)
    for life in range(3):
        dmp = DistributedModelParallel(resumed.Model(), plan=plan, config=tiers)
        updates = dmp.sharded["sparse"].fused_optimizer
        assert updates.num_updates == min(life, 1)
        dmp(cases.batches(2, 1)[0].of([dist.get_rank()])).sum().backward()
        if life == 0:
            dmp.close()
            continue
        with pytest.raises(tierstore.InputError), dmp:
            dmp(KeyedJaggedTensor(["a"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0)))
        dmp.close()


def test_an_error_of_all_ranks_does_not_end_the_process_group(tmp_path: Path) -> None:
    run(2, begin_again, str(tmp_path))


def ends_in_order(path: str) -> None:
    plan = construct_plan(resumed.Model().sparse, resumed.CUTS, 2, name="sparse")
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path)

    def one_step() -> DistributedModelParallel:
        dmp = DistributedModelParallel(resumed.Model(), plan=plan, config=tiers)
        dmp(cases.batches(2, 1)[0].of([dist.get_rank()])).sum().backward()
        return dmp

    def updates() -> int:
        dmp = DistributedModelParallel(resumed.Model(), plan=plan, config=tiers)
        dmp.close(commit=False)
        return dmp.sharded["sparse"].fused_optimizer.num_updates

    dmp, loader = one_step(), iter(())
    try:
        next(loader)
    except StopIteration:
        dmp.close()
    assert updates() == 1
    try:
        raise ImportError("of something that the job does without")
    except ImportError:
        one_step().close()
    assert updates() == 2
    dmp = DistributedModelParallel(resumed.Model(), plan=plan, config=tiers)
    try:
        raise NotImplementedError
    except NotImplementedError:  # in which the whole training runs
        dmp(cases.batches(2, 1)[0].of([dist.get_rank()])).sum().backward()
        dmp.close()
    assert updates() == 3
    dmp = one_step()
    try:
        raise SystemExit(0)
    except SystemExit:
        dmp.close()
    assert updates() == 4
    dmp = one_step()
    try:
        raise SystemExit("wrong arguments")
    except SystemExit:
        dmp.close()
    assert updates() == 4


def test_the_end_of_a_loop_is_no_error(tmp_path: Path) -> None:
    run(2, ends_in_order, str(tmp_path))
