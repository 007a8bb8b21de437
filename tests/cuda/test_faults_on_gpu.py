"""Any call of the driver may fail once: one named error, and no row is lost or wrong afterwards."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import ints
from tierstore import GpuError, TierConfig, TieredEmbeddingBag, TierFullError, optim

ROWS, DIM, STEPS = 200, 32, 8  # each row is in two ranges of the GPU's memory
COMMITS = (2, 5)
"""After these steps the rows are committed."""
ALL = torch.arange(ROWS)
TIERS = TierConfig(hbm="24KiB", uvm="16KiB", ssd="64MiB")
CALLS = {
    "cuMemAlloc": 2, "cuMemHostAlloc": 2, "cuMemCreate": 2, "cuMemMap": 2, "cuMemSetAccess": 1,
    "cuMemGetInfo": 1, "cuModuleGetFunction": 2, "cuLaunchKernel": 701,
    "cuMemcpyAsync": 1, "cuEventSynchronize": 1, "cuStreamIsCapturing": 1,
}  # fmt: skip
"""Calls of the driver, and an error that leaves it usable."""


def bag(config: TierConfig) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(ROWS, DIM, mode="sum", config=config, optimizer=optim.Adagrad(lr=0.1))


def train(table: TieredEmbeddingBag, step: int) -> None:
    table(ints(8, 5, seed=step)).square().sum().backward()


@functools.cache
def rows_after() -> list[Tensor]:
    """Rows before the first step, and after each."""
    with bag(TierConfig(hbm="all")) as table:
        found = [table.rows(ALL)]
        for step in range(STEPS):
            train(table, step)
            found.append(table.rows(ALL))
        return found


def check(rows: Tensor, first: int, last: int) -> None:
    """Every row is as after one of these numbers of steps."""
    fits = torch.stack([(rows == expected).all(1) for expected in rows_after()[first : last + 1]])
    wrong = int((~fits.any(0)).sum())
    assert wrong == 0, f"{wrong} rows are as after none of {first} to {last} steps"


def fails(call: str, after: int, path: Path) -> bool:
    """Train while a call fails after so many; return whether it did."""
    done, committed, said = 0, 0, ""
    # The end of a block of memory that could not be made waits for the device, as one of two may.
    with fake_torch("random", seed=after, devices=2):
        table = bag(replace(TIERS, path=path, device="cuda:0"))
        fake_gpu().fail(call, CALLS[call], after)
        try:
            for step in range(STEPS):
                train(table, step)
                done += 1
                if step in COMMITS:
                    table.commit()
                    committed = done
        except (GpuError, TierFullError) as error:
            said = str(error)
        failed = bool(said)
        assert not failed or call in said or "of GPU memory are needed" in said
        fake_gpu().fail(call, 0, 1 << 30)
        check(table.rows(ALL), done, done + failed)
        for step in range(done + failed, STEPS):
            train(table, step)
        table.close(commit=False)
    with bag(replace(TIERS, path=path)) as again:  # on the CPU
        check(again.rows(ALL), committed, committed + failed)
    return failed


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_once_loses_no_row(call: str, tmp_path: Path) -> None:
    after = faults = 0
    while fails(call, after, tmp_path / f"{after}"):
        after, faults = after + 1 + after // 3, faults + 1
    assert faults >= 1
