"""Automatic windows follow what is looked up, at the same plans as the simulator's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cache_policies import prepare, simulate
from cache_policies.windows import automatic_windows
from tests.bags import ROWS, SGD, Bags, budget, build, everything, train
from tierstore import TierConfig
from tierstore.cache.tiers.read_ahead import bytes_per_row
from tierstore.keys import make_keys
from tierstore.pipeline import windows
from tierstore.pipeline.planned import Planned
from tierstore.pipeline.prefetch import prefetch
from tierstore.rounds import BYTES_PER_ROW, MAX_WINDOW, WINDOW_ROWS

Batches = list[list[torch.Tensor]]
SLOTS, READ_AHEAD, DEPTH = 250, 60_000, 2
ALONE: dict[str, Any] = {"inputs": {"": lambda batch: (batch,)}, "depth": DEPTH}


def drawn(seed: int, *shapes: tuple[int, int, int]) -> Batches:
    """Skewed ids of two tables, in so many batches of so many bags and ids per bag."""
    random = np.random.default_rng(seed)
    return [
        [torch.from_numpy((ROWS * random.random((bags, hot)) ** 2).astype(np.int64)) for _ in range(2)]
        for count, bags, hot in shapes
        for _ in range(count)
    ]


WORKLOADS = {
    "the same": drawn(1, (150, 8, 3)),
    "small, then large": drawn(2, (120, 2, 2), (60, 40, 3)),
    "large, then small": drawn(3, (60, 40, 3), (200, 2, 2)),
    "ten times as hot": drawn(4, (100, 6, 1), (100, 6, 10)),
    "in turns": drawn(5, *[(20, 2, 2), (5, 40, 3)] * 6),
    "shorter than a window": drawn(6, (7, 2, 2)),
}


@pytest.fixture(autouse=True, params=[0, 20_000])
def own_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", request.param)


def opened() -> Bags:
    config = TierConfig(hbm=budget(SLOTS, dim=8), engine="memory", read_ahead=READ_AHEAD)
    return build(config, SGD, (8, 8))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that were known behind each plan."""
    known: list[int] = []
    plan = windows.Window.plan

    def noted(window: windows.Window, batch: Planned, *arguments: Any) -> None:
        plan(window, batch, *arguments)
        known.append(batch.behind or 0)

    monkeypatch.setattr(windows.Window, "plan", noted)
    return known


def keys_of(batch: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([make_keys(table, ids.numpy().reshape(-1)) for table, ids in enumerate(batch)])


def simulated(module: Bags, batches: Batches) -> np.ndarray:
    """The windows as the rule has them: by rows that tiers have use for, and by bytes."""
    keys = [keys_of(batch) for batch in batches]
    sizes = [
        sum(ids.nbytes for ids in batch)
        + 8 * (2 * len(batch[0]) + 1)
        + 4 * len(own)
        + 12 * len(np.unique(own))
        for batch, own in zip(batches, keys, strict=True)
    ]
    before = np.cumsum([0, *sizes])
    each = bytes_per_row(SGD.row_bytes(8))
    useful = max(5 * module.engine.groups[0].fast.capacity, WINDOW_ROWS * int(READ_AHEAD / each))

    def is_full(first: int, end: int, distinct: int) -> bool:
        taken = before[end] - before[first] + int(distinct * BYTES_PER_ROW) - windows.WINDOW_BYTES
        free = max(0, min(READ_AHEAD // 2, int(READ_AHEAD - distinct / WINDOW_ROWS * each)))
        return end - first > MAX_WINDOW or distinct >= useful or max(0, taken) > free

    return automatic_windows(prepare(keys), is_full, depth=DEPTH)


@pytest.mark.parametrize("name", WORKLOADS)
def test_windows_and_misses_are_the_simulators(name: str, planned: list[int]) -> None:
    batches = WORKLOADS[name]
    with opened() as module:
        train(module, prefetch(batches, module, **ALONE))  # type: ignore[arg-type]
        known = simulated(module, batches)
        assert planned == known.tolist()
        (group,) = module.engine.groups
        live = group.stats.tiers["hbm"]
        result = simulate(
            [keys_of(batch) for batch in batches], "lookahead", group.fast.capacity, depth=DEPTH, window=known
        )
        assert live.rows - live.row_hits == result.misses


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_tensors_that_batches_share_count_once(shared: int, own: int) -> None:
    """Also twice in a batch, and down to the last batch."""
    common = torch.ones(100)
    with opened() as module:
        window = windows.Window(module.engine.groups, 1)
        batches = [Planned([*[common] * shared, *[torch.ones(10) for _ in range(own)]]) for _ in range(3)]
        for number, batch in enumerate(batches, 1):
            window.add(batch)
            assert window._bytes == 400 * (shared > 0) + 40 * own * number
        for left, batch in zip([2, 1, 0], batches, strict=True):
            window.plan(batch, is_full=True, depth=1)
            assert window._bytes == 400 * (shared > 0 and left > 0) + 40 * own * left
        assert not window._sharing


@pytest.mark.parametrize("name", WORKLOADS)
def test_bits_are_those_of_training_in_memory(name: str) -> None:
    with opened() as module, build(TierConfig(hbm="all"), SGD, (8, 8)) as memory:
        got = train(module, prefetch(WORKLOADS[name], module, **ALONE))  # type: ignore[arg-type]
        want = train(memory, WORKLOADS[name])
        for one, other in zip(got + everything(module), want + everything(memory), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["small, then large", "large, then small", "ten times as hot"])
def test_a_window_becomes_that_of_a_fresh_start(name: str) -> None:
    """After at most as many batches as the longer of both windows has."""
    batches = WORKLOADS[name]
    with opened() as module:
        known = simulated(module, batches)
        lengths, most = set(known.tolist()), known.max()
        for start in range(len(batches)):
            fresh = simulated(module, batches[start : start + most + 2])[0]
            assert known[start] <= fresh
            if start + fresh < len(batches) - 1 and not 100 - most < start < 100 + 2 * most:
                assert known[start] == fresh
        assert max(lengths) > 2 * min(lengths)


def test_time_decides_nothing(planned: list[int]) -> None:
    batches, runs = WORKLOADS["in turns"], []
    random = np.random.default_rng(7)

    def slowly() -> Iterator[list[torch.Tensor]]:
        for batch in batches:
            time.sleep(0.002 * random.random() ** 4)
            yield batch

    for is_slow in (False, True, True):
        with opened() as module:
            for ids in prefetch(slowly() if is_slow else batches, module, **ALONE):
                module(ids).sum().backward()
                time.sleep(0.002 * is_slow * random.random() ** 4)
            stats = module.engine.stats()
            runs.append((list(planned), stats["tiers"]["hbm"]["row_hits"], stats["evicted_rows"]))
        planned.clear()
    assert runs[0] == runs[1] == runs[2]


def test_pulls_come_between_the_same_steps() -> None:
    """A loader that draws random numbers gets the same ones, however fast the threads are."""
    orders = []
    for pause in (0.0, 0.003):
        order: list[str] = []

        def loader(order: list[str] = order) -> Iterator[list[torch.Tensor]]:
            for batch in WORKLOADS["in turns"]:
                order.append("pull")
                yield batch

        with opened() as module:
            for ids in prefetch(loader(), module, **ALONE):
                order.append("step")
                module(ids).sum().backward()
                time.sleep(pause)
        orders.append(order)
    assert orders[0] == orders[1]


def test_batches_that_no_forward_takes_and_graphs_that_stay() -> None:
    """Decisions go by plans, which come all the same."""
    with opened() as module:
        kept = []
        for number, ids in enumerate(prefetch(WORKLOADS["in turns"], module, **ALONE)):
            if number % 3 == 0:
                continue
            kept.append(module(ids))
            if len(kept) > 3:
                kept.pop(0).sum().backward()


def test_a_loop_that_is_left_ends(planned: list[int]) -> None:
    for left_at in (0, 1, 60, 119, 121):
        with opened() as module:
            for number, ids in enumerate(prefetch(WORKLOADS["small, then large"], module, **ALONE)):
                module(ids).sum().backward()
                if number == left_at:
                    break
        assert not [t for t in threading.enumerate() if t.name == "tierstore-prefetch" and not t.daemon]
    assert planned


def test_statistics_have_the_window_of_the_newest_plan() -> None:
    with opened() as module:
        lengths = []
        for ids in prefetch(WORKLOADS["large, then small"], module, **ALONE):
            lengths.append(next(iter(module.engine.stats()["groups"].values()))["window"])
            module(ids).sum().backward()
        assert max(lengths) > 2 * min(lengths) > 0
        assert lengths[-1] > 1  # the end of a pass is no short window
