"""Threads that train one module make their updates one after the other: none is lost, and each is counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.bags import build
from tierstore import TierConfig
from tierstore.optim import SGD

THREADS, STEPS, DIM = 2, 300, 8
IDS = torch.tensor([[0, 1, 2, 1]])
USES = torch.tensor([1.0, 2.0, 1.0])  # of each row in a step


@pytest.fixture
def often_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often_switching")
def test_no_update_of_a_thread_is_lost() -> None:
    with build(TierConfig(hbm="all"), SGD(lr=2.0**-12), (DIM,)) as module:
        module.load_rows(torch.arange(3), torch.zeros(3, DIM))

        def train() -> None:
            for _ in range(STEPS):
                module([IDS]).sum().backward()

        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(train) for _ in range(THREADS)]:
                done.result()
        steps = THREADS * STEPS
        assert module.fused_optimizer.num_updates == steps
        expected = -(2.0**-12) * steps * USES
        assert torch.equal(module.rows(torch.arange(3)), expected[:, None].expand(-1, DIM))
