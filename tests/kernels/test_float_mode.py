"""Denormal numbers: results do not depend on which thread computes them, whatever the caller's mode is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tierstore
from tierstore import TierConfig, TieredEmbeddingBag, _core, optim
from tierstore.initializers import uniform

ROWS, DIM = 3000, 16


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads = _core.num_threads()
    yield
    torch.set_flush_denormal(False)
    _core.set_num_threads(threads)


def trained(flush: bool, threads: int, depth: int | None, config: TierConfig) -> tuple[torch.Tensor, ...]:
    """Outputs and rows of a training in which everything is denormal: rows, gradients, learning rate."""
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot flush denormal numbers")
    _core.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(ROWS, (6000,), generator=generator) for _ in range(6)]
    with TieredEmbeddingBag(
        ROWS, DIM, mode="sum", config=config, optimizer=optim.SGD(lr=0.5), init=uniform(-3e-38, 3e-38)
    ) as table:
        outs = []
        loop = batches if depth is None else tierstore.prefetch(batches, table, depth=depth, window=4)
        for ids in loop:
            offsets = torch.arange(0, len(ids), 3)
            out = table(ids, offsets) if depth is None else table(ids.view(-1, 3))
            (out * 1e-4).sum().mul(1e-35).backward()
            outs.append(out.detach().clone())
        return torch.cat(outs), table.rows(torch.arange(ROWS))


@pytest.mark.parametrize("flush", [False, True])
def test_results_do_not_depend_on_threads(flush: bool) -> None:
    memory = TierConfig(hbm="all")
    want = trained(flush, 1, None, memory)
    tiers = TierConfig(hbm="160KiB", ssd="1GiB", engine="memory")
    for threads in (2, 7):
        for got in (trained(flush, threads, None, memory), trained(flush, threads, None, tiers)):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("flush", [False, True])
def test_initial_values_do_not_depend_on_the_mode(flush: bool) -> None:
    def initial(flush: bool) -> torch.Tensor:
        torch.set_flush_denormal(False)  # in which the bounds of the values are made single precision
        with TieredEmbeddingBag(
            ROWS, DIM, mode="sum", config=TierConfig(hbm="all"), init=uniform(-1e-39, 1e-39)
        ) as table:
            torch.set_flush_denormal(flush)
            return table.rows(torch.arange(ROWS)).view(torch.int32)

    _core.set_num_threads(3)
    want = initial(False)
    assert want.bool().any()
    assert torch.equal(initial(flush), want)
    # The caller's mode is as it was.
    flushed = torch.tensor([1e-39]) + 0 == 0
    assert bool(flushed) == flush


def test_the_mode_of_the_caller_decides() -> None:
    memory = TierConfig(hbm="all")
    kept, flushed = trained(False, 4, None, memory), trained(True, 4, None, memory)
    assert not torch.equal(kept[0], flushed[0])
