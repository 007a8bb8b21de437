"""A prefetch is iterated like the loader that it is made of: again and again, and from a position."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.bags import SGD, Bags, budget, build, everything, random_batches
from tierstore import TierConfig
from tierstore.errors import ConfigError
from tierstore.pipeline.position import Prefetched
from tierstore.pipeline.prefetch import prefetch

BATCHES = random_batches(0, 20, 1, 4, 3)
INPUTS = {"": lambda batch: (batch,)}


def ahead(module: Bags, loader: Any = BATCHES) -> Prefetched[Any]:
    return prefetch(loader, module, inputs=INPUTS, depth=2, window=5)


def module() -> Bags:
    return build(TierConfig(hbm=budget(90), engine="memory"), SGD, (3,))


def train(bags: Bags, batches: Any) -> list[Any]:
    seen = []
    for batch in batches:
        bags(batch).sin().sum().backward()
        seen.append(batch)
    return seen


def planned_ahead(bags: Bags) -> bool:
    """Whether lookups were announced: prefetch was at work, and not only the loader."""
    return bags.engine.groups[0].stats.prefetched == (2, 5)


@pytest.mark.parametrize("left_at", [None, 1, 7])
def test_every_loop_is_a_pass_from_the_beginning(left_at: int | None) -> None:
    with module() as bags, build(TierConfig(hbm="all"), SGD, (3,)) as memory:
        batches = ahead(bags)
        assert len(batches) == 20
        for epoch in range(3):
            bags.engine.groups[0].stats.reset()
            bags.engine.groups[0].stats.prefetched = None
            if left_at is not None and epoch == 1:
                for number, batch in enumerate(batches):
                    bags(batch).sin().sum().backward()
                    memory(batch).sin().sum().backward()
                    if number == left_at:
                        break
                continue
            seen = train(bags, batches)
            assert [id(batch) for batch in seen] == [id(batch) for batch in BATCHES]
            assert batches.state_dict() == {"batches": 20, "loader": None}
            assert planned_ahead(bags)
            train(memory, BATCHES)
        for a, b in zip(everything(bags), everything(memory), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("left_at", [0, 7, 19])
def test_an_iterator_goes_on_where_the_last_loop_was_left(left_at: int) -> None:
    """No batch that was pulled ahead is lost."""
    with module() as bags:
        batches = ahead(bags, iter(BATCHES))
        seen = []
        for number, batch in enumerate(batches):
            seen.append(batch)
            if number == left_at:
                break
        seen += train(bags, batches)
        assert [id(batch) for batch in seen] == [id(batch) for batch in BATCHES]
        assert train(bags, batches) == []


def test_next_begins_a_pass_that_a_loop_goes_on_with() -> None:
    with module() as bags:
        batches = ahead(bags)
        first = next(batches)
        assert [id(first), *map(id, train(bags, batches))] == [id(batch) for batch in BATCHES]
        with pytest.raises(StopIteration):
            next(batches)
        assert len(train(bags, batches)) == 20


def test_a_new_pass_ends_the_one_before_it() -> None:
    with module() as bags:
        batches = ahead(bags)
        older = iter(batches)
        next(older)
        newer = iter(batches)
        next(newer)
        with pytest.raises(ConfigError, match="another pass over this prefetch has begun"):
            next(older)
        assert len(train(bags, newer)) == 19
        with pytest.raises(StopIteration):
            next(newer)
        exhausted = newer
        iter(batches)
        with pytest.raises(StopIteration):
            next(exhausted)


def test_a_position_is_of_its_epoch() -> None:
    with module() as bags:
        batches = ahead(bags)
        train(bags, batches)
        for number, _ in enumerate(batches):
            if number == 4:
                break
        state = batches.state_dict()
        assert state["batches"] == 5
    with module() as bags:
        batches = ahead(bags)
        batches.load_state_dict(state)
        assert len(train(bags, batches)) == 15
        assert len(train(bags, batches)) == 20
        batches.load_state_dict(state)  # between two passes
        assert len(train(bags, batches)) == 15


class Prepared:
    """What Accelerate makes of a loader: a ``state_dict`` that fails where the loader has no state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)

    def __len__(self) -> int:
        return len(BATCHES)

    def state_dict(self) -> Any:
        return self.dl_state_dict  # type: ignore[attr-defined]


def test_a_state_dict_that_is_there_only_by_name() -> None:
    with module() as bags:
        batches = ahead(bags, Prepared())
        assert len(batches) == 20
        for _ in range(2):
            assert len(train(bags, batches)) == 20
        assert batches.state_dict() == {"batches": 20, "loader": None}


def test_a_loader_with_workers_is_asked_for_one_iterator_per_pass() -> None:
    class Counting:
        iterators = 0

        def __iter__(self) -> Iterator[Any]:
            self.iterators += 1
            return iter(BATCHES)

    with module() as bags:
        loader = Counting()
        batches = ahead(bags, loader)
        for _ in range(3):
            train(bags, batches)
        assert loader.iterators == 3


@pytest.mark.parametrize("thread", ["main", "tierstore-prefetch"])
def test_a_loop_that_was_left_in_a_cycle_is_collected_anywhere(thread: str) -> None:
    """The collector may run while this thread holds what the worker of that loop waits for."""

    def leave() -> None:
        passing: Any = iter(ahead(bags))
        next(passing)
        knot = [passing]
        knot.append(knot)

    def collect() -> None:
        with bags.engine.groups[0].residency_lock:
            gc.collect()

    with module() as bags:
        gc.disable()
        try:
            leave()
            if thread == "main":
                collect()
            else:
                other = threading.Thread(target=collect, name=thread)
                other.start()
                other.join()
        finally:
            gc.enable()
        deadline = time.monotonic() + 60
        while any(t.name in ("tierstore-prefetch", "tierstore-end") for t in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert bags.engine.groups[0].window.lookups == 0
        assert len(train(bags, ahead(bags))) == 20
