"""GradScaler: rows move as without one, stay where it skips, and if it does not know of them."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import pytest
import torch

import tierstore
from tests.modules.accumulated_cases import CASES, ROWS, SPECS, batch_of, equal, everything, models, sum_loss
from tests.modules.module_oracles import PAIRS, all_rows
from tierstore import optim
from tierstore.errors import ConfigError
from tierstore.modules import wrappers


def scaler(scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_scaled_step_has_the_bits_of_one_without(spec: optim.OptimizerSpec, unscaled_before: bool) -> None:
    with CASES["sum"].make(optimizer=spec) as ours, CASES["sum"].make(optimizer=spec) as plain:
        for seed in range(3):
            sum_loss(plain, batch_of(seed).ids).backward()
        amp = scaler(growth_interval=1)
        for seed in range(3):
            with tierstore.accumulate(ours) as kept:
                amp.scale(sum_loss(ours, batch_of(seed).ids)).backward()
                if unscaled_before:
                    amp.unscale_(kept)
                amp.step(kept)
                amp.update()
        equal(ours, plain)
        assert amp.get_scale() == 8 * 1024


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_step_is_skipped_where_the_scaler_skips(wrong: float, unscaled_before: bool) -> None:
    with CASES["sum"].make(optimizer=optim.Adam(lr=0.1)) as ours:
        before, amp = everything(ours), scaler()
        with tierstore.accumulate(ours) as kept:
            amp.scale(sum_loss(ours, batch_of(0).ids)).backward()
            amp.scale(sum_loss(ours, batch_of(1).ids[:1], wrong)).backward()
            if unscaled_before:
                amp.unscale_(kept)
            amp.step(kept)
            amp.update()
        assert amp.get_scale() == 512
        assert ours.fused_optimizer.num_updates == 0
        for mine, other in zip(everything(ours), before, strict=True):
            assert torch.equal(mine, other)


def test_scaling_clipping_and_accumulating_together() -> None:
    ours, theirs = models(PAIRS[0])
    optimizers = [
        torch.optim.SGD(ours.top.parameters(), lr=0.3),
        torch.optim.SGD(theirs.parameters(), lr=0.3),
    ]
    amp = scaler()
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with tierstore.accumulate(ours) as kept:
            for part in batch_of(step).ids.split(4):
                amp.scale(ours(part)).backward()
                theirs(part).backward()
            amp.unscale_(optimizers[0])
            amp.unscale_(kept)
            torch.nn.utils.clip_grad_norm_([*ours.parameters(), *kept.parameters()], 0.5)
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            amp.step(optimizers[0])
            amp.step(kept)
            amp.update()
        optimizers[1].step()
    torch.testing.assert_close(all_rows(ours.table, ROWS).double(), theirs.table.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.top.weight.double(), theirs.top.weight, rtol=1e-4, atol=1e-5)


def test_scaled_gradients_without_accumulate_are_refused_before_anything_moves() -> None:
    with CASES["sum"].make(optimizer=optim.SGD(lr=0.1)) as ours:
        sum_loss(ours, batch_of(0).ids).backward()  # none is in use yet
        before = everything(ours)
        unused, off = scaler(), scaler(enabled=False)
        off.scale(sum_loss(ours, batch_of(0).ids)).backward()
        ours.load_rows(torch.arange(ROWS), before[0])
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"with tierstore.accumulate\(model\) as rows"):
                unused.scale(sum_loss(ours, batch_of(0).ids)).backward()
        with pytest.raises(ConfigError, match=r"scaler.step\(rows\)"), tierstore.accumulate(ours):
            unused.scale(sum_loss(ours, batch_of(0).ids)).backward()  # and no scaler.step(rows)
        assert torch.equal(everything(ours)[0], before[0])
        assert ours.fused_optimizer.num_updates == 2
        ours.refuse_scaled = False  # the scaler is another model's
        sum_loss(ours, batch_of(0).ids).backward()
        ours.refuse_scaled = True
        unused = scaler()  # another object, and as many as before
        with pytest.raises(ConfigError, match="a GradScaler is in use"):
            unused.scale(sum_loss(ours, batch_of(0).ids)).backward()
        del unused
        sum_loss(ours, batch_of(0).ids).backward()
        assert ours.fused_optimizer.num_updates == 4


def test_signals_that_come_often_do_not_keep_the_search_for_scalers_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tick(Exception):
        pass

    def tick(*_: object) -> None:
        raise Tick

    def slow(*kinds: type) -> list[object]:
        time.sleep(0.2)
        return []

    monkeypatch.setattr(wrappers.gc, "get_referrers", slow)
    scalers, before, done = (
        wrappers._Objects(wrappers._scaler_kinds),
        signal.signal(signal.SIGALRM, tick),
        False,
    )
    try:
        for _ in range(60):
            with contextlib.suppress(Tick):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                done = scalers.all() == []
                signal.setitimer(signal.ITIMER_REAL, 0)
            if done:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert done
