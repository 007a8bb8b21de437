"""Lookups that a thread beside the worker makes, and those that the worker makes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.bags import SGD, budget, build, everything, random_batches
from tests.pipeline.conftest import BESIDE, BY_WORKER
from tests.pipeline.test_prefetch import INPUTS, reference, run, workers
from tierstore import TierConfig
from tierstore.pipeline import made
from tierstore.pipeline.learning import Call
from tierstore.pipeline.planned import Planned
from tierstore.pipeline.prefetch import prefetch
from tierstore.pipeline.worker import Worker


@pytest.mark.parametrize(
    ("threads", "name"), [(BY_WORKER, "tierstore-prefetch"), (BESIDE, "tierstore-lookups")]
)
def test_the_first_batch_is_fetched_ahead_when_inputs_are_given(
    threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "MANY_THREADS", threads)
    batches = random_batches(5, 6, 1, 10, 3)
    with build(TierConfig(hbm=budget(200), engine="memory"), SGD, (5,)) as module:
        names = []
        original = module.make_lookup
        module.make_lookup = lambda ids: names.append(threading.current_thread().name) or original(ids)  # type: ignore
        run(module, batches, depth=2, window=2)
        assert names == [name] * 6
    assert name not in (thread.name for thread in threading.enumerate())


def test_a_slow_lookup_does_not_keep_a_pass_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for lookups that nobody will make is told so."""
    monkeypatch.setattr(made, "MANY_THREADS", BESIDE)
    batches = random_batches(5, 12, 1, 10, 3)
    with build(TierConfig(hbm=budget(200), engine="memory"), SGD, (5,)) as module:
        original, slow, goes_on = module.make_lookup, threading.Event(), threading.Event()

        def make(ids: Any) -> Any:
            if ids is batches[5]:
                slow.set()
                goes_on.wait(60)
            return original(ids)

        module.make_lookup = make  # type: ignore[method-assign]
        passed = prefetch(batches, module, depth=0, window=8, inputs=INPUTS)
        threading.Timer(0.2, goes_on.set).start()
        module(next(passed)).sum().backward()
        assert slow.is_set()
        passed.close()
    assert workers() == 0


def test_no_lookup_is_made_any_more_when_a_pass_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends without waiting for a lookup, but not before the thread that makes it."""
    monkeypatch.setattr(made, "MANY_THREADS", BESIDE)
    batches = random_batches(5, 6, 1, 10, 3)
    begun = threading.Event()

    def slow(batch: Any) -> Any:
        begun.set()
        time.sleep(0.5)
        return batch

    with build(TierConfig(hbm=budget(200), engine="memory"), SGD, (5,)) as module:
        worker = Worker([], [Call(module, lambda batch: ((slow(batch),), {}))])
        worker.give(Planned(batches[0]), is_last=False)
        assert begun.wait(60)
        worker.stop()
        worker.work()
        assert "tierstore-lookups" not in (thread.name for thread in threading.enumerate())


def test_the_worker_makes_lookups_where_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "MANY_THREADS", BESIDE)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tierstore-lookups":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    batches = random_batches(5, 12, 1, 10, 3)
    want = reference(batches, SGD, (5,))
    with build(TierConfig(hbm=budget(90), engine="memory"), SGD, (5,)) as module:
        got = run(module, batches, depth=2, window=4) + everything(module)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
