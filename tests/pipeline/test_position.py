"""The position of a prefetch is that of the training, not of the batches pulled ahead."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.bags import SGD, Bags, budget, build, random_batches
from tierstore import TierConfig
from tierstore.cache.stats import counters_of, go_on_counting
from tierstore.errors import ConfigError, InputError
from tierstore.pipeline.prefetch import prefetch

INPUTS = {"": lambda batch: (batch,)}
BATCHES = random_batches(0, 20, 1, 4, 3)


class Loader:
    """A stateful data loader, as torchdata's: its own state is ahead of the training's."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(BATCHES):
            self.position += 1
            yield BATCHES[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def module() -> Bags:
    return build(TierConfig(hbm=budget(90), engine="memory"), SGD, (3,))


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("used", [1, 2, 7, 19, 20])
def test_a_run_that_goes_on_counts_every_batch_once(used: int, closed: bool) -> None:
    with module() as whole:
        for batch in prefetch(BATCHES, whole, inputs=INPUTS, depth=2, window=5):
            whole(batch).sum().backward()
        want = whole.stats()
    with module() as first:
        batches = prefetch(BATCHES, first, inputs=INPUTS, depth=2, window=5)
        for _ in range(used):
            first(next(batches)).sum().backward()
        group = first.engine.groups[0]
        wait_until(lambda: group.stats.counters.lookups == min(20, used + 2))  # those of the batches ahead
        if closed:
            batches.close()
        saved = json.loads(json.dumps(counters_of(first.engine.groups)))
        batches.close()
    (counters,) = saved.values()
    assert counters["group"]["lookups"] == used
    with module() as second:
        go_on_counting(second.engine.groups, saved)
        for batch in prefetch(BATCHES[used:], second, inputs=INPUTS, depth=2, window=5):
            second(batch).sum().backward()
        got = second.stats()
    assert got["lookups"] == want["lookups"] == 20
    for what in ("rows", "accesses"):
        assert got["tiers"]["hbm"][what] == want["tiers"]["hbm"][what]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("used", [0, 1, 7, 20])
@pytest.mark.parametrize("stateful", [True, False])
def test_going_on_from_a_position(used: int, stateful: bool) -> None:
    with module() as first:
        loader = Loader() if stateful else BATCHES
        batches = prefetch(loader, first, inputs=INPUTS, depth=2, window=5)
        for _ in range(used):
            first(next(batches)).sum().backward()
        state = batches.state_dict()
        assert state["batches"] == used
        if stateful and 0 < used < 20:
            assert loader.position > used
            assert state["loader"] == {"position": used}
        batches.close()
    with module() as second:
        batches = prefetch(Loader() if stateful else BATCHES, second, inputs=INPUTS, depth=2, window=5)
        batches.load_state_dict(state)
        assert batches.state_dict() == state
        rest = list(batches)
        assert len(rest) == 20 - used
        for got, expected in zip(rest, BATCHES[used:], strict=True):
            assert torch.equal(got[0], expected[0])
        assert batches.state_dict()["batches"] == 20


def test_wrong_positions() -> None:
    with module() as bags:
        batches = prefetch(BATCHES, bags, inputs=INPUTS)
        with pytest.raises(InputError, match="not the position of a prefetch"):
            batches.load_state_dict({"position": 3})
        with pytest.raises(ConfigError, match="a list has none"):
            batches.load_state_dict({"batches": 1, "loader": {"position": 1}})
        next(batches)
        with pytest.raises(ConfigError, match="has begun"):
            batches.load_state_dict({"batches": 1, "loader": None})
        batches.close()
        with pytest.raises(StopIteration):
            next(batches)
    with module() as bags, pytest.raises(TypeError, match="a int is no iterable"):
        prefetch(3, bags)  # type: ignore[type-var]
