"""Ctrl-C in an update on a GPU: rows of all row layouts, and the count of updates, are as before or after it.

On the CPU it is tests/pipeline/test_interrupted_updates.py. On a GPU autograd makes
updates in threads of its own, which no signal interrupts; those of ``accumulate`` are the main thread's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import ADAM, ROWS, keyed
from tests.density import every
from tests.pipeline.interrupts import Interrupted, Interrupter, Steps
from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    GpuError,
    TierConfig,
    accumulate,
)
from tierstore.modules import row_updates

BEFORE = 2
CONFIGS = {"memory": TierConfig(hbm="all"), "two tiers": TierConfig(hbm="10KiB", engine="memory")}


def build(config: TierConfig) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=f"of {key}", num_embeddings=ROWS, embedding_dim=dim, feature_names=[key])
        for key, dim in (("a", 8), ("b", 3))
    ]
    return EmbeddingBagCollection(tables=tables, config=config, optimizer=ADAM, seed=5)


STEPS = Steps(lambda: build(CONFIGS["memory"]), keyed, ROWS, BEFORE + 2)
step, is_state = STEPS.step, STEPS.is_state


CHECKS = {"": False, "with checks": True}


def interrupted(module: EmbeddingBagCollection, interrupter: Interrupter, collect: Callable) -> None:
    """Make step BEFORE, in whose update the interrupter comes."""

    def watched(plain: Callable) -> Callable:
        def call(*args: object) -> object:
            with interrupter.on():
                return plain(*args)

        return call

    with suppress(Interrupted), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierstore.modules.lookup.update_rows", watched(row_updates.update_rows))
        for name in ("prepared_update", "make_updates"):
            plain = getattr(row_updates, name)
            patch.setattr(f"tierstore.modules.accumulation.{name}", watched(plain))
        step(module, BEFORE, collect)


def lines_of_an_update(config: str, collect: Callable, checks: bool, first: int, stride: int) -> int:
    """Interrupt the update at each ``stride``-th line; return how many lines it has."""
    at, came = first, True
    tiers = replace(CONFIGS[config], device="cuda:0", check_gradients=checks)
    while came:
        with fake_torch("random", seed=at, leaks=True), build(tiers) as module:
            for number in range(BEFORE):
                step(module, number)
            interrupter = Interrupter(at)
            interrupted(module, interrupter, collect)
            if is_state(module, BEFORE):
                step(module, BEFORE)
            assert is_state(module, BEFORE + 1), interrupter.where
            step(module, BEFORE + 1)
            assert is_state(module, BEFORE + 2), interrupter.where
        at, came = at + stride, interrupter.came
    return interrupter.lines


@pytest.mark.parametrize("checks", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("collect", [nullcontext, accumulate], ids=["", "accumulated"])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_exception_at_any_line_of_an_update(config: str, collect: Callable, checks: bool) -> None:
    """Training goes on with the bits that it would have had."""
    first = 1 + 4 * list(CONFIGS).index(config) + 2 * checks
    assert lines_of_an_update(config, collect, checks, first, stride=every(113)) > 300


@pytest.mark.parametrize("after", [0, 1])
def test_a_launch_that_fails_before_rows_change_ends_the_update(after: int) -> None:
    """No kernel behind it is launched, the update is not counted, and training goes on."""
    with fake_torch("eager"), build(replace(CONFIGS["memory"], device="cuda:0")) as module:
        step(module, 0)
        out = module(keyed(1)).values().sin().sum()
        launched = fake_gpu().counts["launches"]
        fake_gpu().fail("cuLaunchKernel", 701, after)
        with pytest.raises(GpuError, match=f"cuLaunchKernel of {['bag_shares', 'update_singles'][after]}"):
            out.backward()
        assert fake_gpu().counts["launches"] == launched + after
        assert is_state(module, 1)
        step(module, 1)
        assert is_state(module, 2)


def test_a_launch_that_fails_between_row_layouts_ends_the_use_of_the_device(tmp_path: Path) -> None:
    """Rows of one layout are updated, and those of the other are not: nothing of it may be committed."""
    config = TierConfig(hbm="10KiB", path=tmp_path / "rows")
    with fake_torch("eager"):
        module = build(replace(config, device="cuda:0"))
        step(module, 0)
        module.commit()
        out = module(keyed(1)).values().sin().sum()
        fake_gpu().fail("cuLaunchKernel", 701, 2)
        with pytest.raises(GpuError, match=r"cuLaunchKernel of bag_shares .* last commit are safe"):
            out.backward()
        for later in (module.commit, lambda: step(module, 1), module.close):
            with pytest.raises(GpuError, match="cuLaunchKernel of bag_shares"):
                later()
        fake_gpu().forget()
    with build(config) as again:  # on the CPU
        assert is_state(again, 1)
