"""A lookup is a transaction, whichever step of it a signal handler's exception (Ctrl-C) meets."""

from __future__ import annotations

import faulthandler
import functools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from tests.bags import Bags, budget, build, everything, random_batches
from tests.density import every
from tests.pipeline.interrupts import Interrupted, Interrupter
from tierstore import TierConfig, optim
from tierstore.pipeline.prefetch import prefetch

ADAGRAD = optim.Adagrad(lr=0.1)
BATCHES = random_batches(1, 5, 1, 6, 4)
INPUTS = {"": lambda batch: (batch,)}
# Rows of the tiers in memory; with fewer slots than a batch has rows, overflow slots are in use.
TIERS = {
    "one tier": TierConfig(hbm="all"),
    "two tiers": TierConfig(hbm=budget(30, ADAGRAD), engine="memory"),
    "three tiers": TierConfig(hbm=budget(30, ADAGRAD), uvm=budget(20, ADAGRAD), engine="memory"),
    "three tiers and overflow": TierConfig(hbm=budget(16, ADAGRAD), uvm=budget(16, ADAGRAD), engine="memory"),
}


def step(module: Bags, ids: Any) -> None:
    module(ids).sin().sum().backward()


@functools.cache
def states() -> list[list[torch.Tensor]]:
    """All rows before the first step and after each."""
    module = build(TierConfig(hbm="all"), ADAGRAD, (5,))
    found = [everything(module)]
    for ids in BATCHES:
        step(module, ids)
        found.append(everything(module))
    return found


def reached(module: Bags, at_least: int) -> int:
    """Which of the states the rows are in: that before the step that was interrupted, or that after it."""
    rows = everything(module)
    for number in (at_least, at_least + 1):
        if number < len(states()) and all(
            torch.equal(a, b) for a, b in zip(rows, states()[number], strict=True)
        ):
            return number
    raise AssertionError("rows are neither as before the interrupted step nor as after it")


def train_interrupted(config: TierConfig, ahead: bool, interrupter: Any) -> bool:
    """Whether an interrupt came before the training was over."""
    done = 0
    with build(config, ADAGRAD, (5,)) as module:
        while done < len(BATCHES):
            rest: Any = BATCHES[done:]
            try:
                with interrupter.on():
                    for ids in prefetch(rest, module, depth=1, window=2, inputs=INPUTS) if ahead else rest:
                        step(module, ids)
                        done += 1
                    module.flush()
            except Interrupted:
                done = reached(module, done)
        assert reached(module, done) == done
        step(module, BATCHES[0])  # whatever was interrupted, training goes on
    return interrupter.came


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
@pytest.mark.parametrize("tiers", TIERS)
def test_an_exception_at_any_line(tiers: str, ahead: bool) -> None:
    stride = every(29)
    at = 1 + (2 * list(TIERS).index(tiers) + ahead) % stride
    while train_interrupted(TIERS[tiers], ahead, Interrupter(at)):
        at += stride
    assert at > 900


@pytest.mark.parametrize("config", [TierConfig(hbm="all"), TierConfig(hbm="1MiB", engine="memory")])
def test_an_exception_at_any_line_of_a_lookup_of_rows_that_are_here(config: TierConfig) -> None:
    expected = []
    with build(TierConfig(hbm="all"), ADAGRAD, (5,)) as memory:
        for number in range(3):  # before the interrupted step, after it, and after the next step
            for ids in BATCHES if number == 0 else BATCHES[:1]:
                step(memory, ids)
            expected.append(everything(memory))
    at, came = 1, True
    while came:
        interrupter = Interrupter(at)
        with build(config, ADAGRAD, (5,)) as module:
            for ids in BATCHES:
                step(module, ids)
            with suppress(Interrupted), interrupter.on():
                step(module, BATCHES[0])
            rows, done = everything(module), 0
            while not all(map(torch.equal, rows, expected[done])):
                done += 1
                assert done < 2
            step(module, BATCHES[0])
            assert all(map(torch.equal, everything(module), expected[done + 1]))
            assert module.engine.stats()["lookups"] in (len(BATCHES) + 1, len(BATCHES) + 2)
        at, came = at + every(3), interrupter.came
    assert at > 60


def change(module: Bags, ids: torch.Tensor, values: torch.Tensor) -> None:
    module.load_rows(ids, values)
    module.engine.commit()
    module.reset_parameters()
    module.load_rows(ids[::2], values[::2])
    module.flush()


@pytest.mark.parametrize("tiers", ["two tiers", "three tiers and overflow"])
def test_rows_that_are_changed_are_as_before_or_after(tiers: str) -> None:
    ids, values = torch.arange(0, 120), torch.arange(600.0).view(120, 5)
    with build(TierConfig(hbm="all"), ADAGRAD, (5,)) as memory:
        initial = memory.rows(ids)
    at, came = 1, True
    while came:
        interrupter = Interrupter(at)
        with build(TIERS[tiers], ADAGRAD, (5,)) as module:
            with suppress(Interrupted), interrupter.on():
                change(module, ids, values)
            rows = module.rows(ids)
            assert ((rows == initial).all(1) | (rows == values).all(1)).all()
            change(module, ids, values)
            rows = module.rows(ids)
            assert torch.equal(rows[::2], values[::2])
            assert torch.equal(rows[1::2], initial[1::2])
        at, came = at + every(31), interrupter.came
    assert at > 300


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
def test_a_handler_that_commits_at_any_line(ahead: bool) -> None:
    """As that of SIGTERM often does."""
    at, came = 1, True
    while came:
        with build(TIERS["three tiers and overflow"], ADAGRAD, (5,)) as module:
            interrupter = Interrupter(at, module.engine.commit)  # type: ignore[arg-type]
            batches: Any = prefetch(BATCHES, module, depth=1, window=2, inputs=INPUTS) if ahead else BATCHES
            with interrupter.on():
                for ids in batches:
                    with torch.no_grad():
                        module(ids)
                    step(module, ids)
            came = bool(interrupter.where)
            assert reached(module, len(BATCHES)) == len(BATCHES)
            assert len(module.engine.commits()) == came
        at += every(31)
    assert at > 400


class Timer:
    """Signals at any time, from the kernel's timer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.came = 0
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, *_: Any) -> None:
        self.came += 1
        raise Interrupted

    @contextmanager
    def on(self) -> Iterator[None]:
        try:
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(2e-4, 0.02))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def train_under_signals(seconds: float, at_least: int) -> None:
    """Train for some seconds, or for longer where few signals have come by then."""
    timer, end, rounds = Timer(0), time.monotonic() + seconds, 0
    while time.monotonic() < end or timer.came < at_least:
        faulthandler.dump_traceback_later(60, exit=True)
        tiers = list(TIERS)[rounds % len(TIERS)]
        train_interrupted(TIERS[tiers], rounds // len(TIERS) % 2 == 1, timer)
        rounds += 1
    faulthandler.cancel_dump_traceback_later()
    print(f"{timer.came} interrupts")


def test_signals_of_a_timer() -> None:
    code = "from tests.pipeline.test_interrupts import train_under_signals as train; train(8, 21)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) > 20
