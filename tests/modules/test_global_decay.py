"""Weight decay of rows that are not in the batch: the stated formula, tiers, commits, and loaded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import ConfigError, StoreMismatchError, TierConfig, TieredEmbedding, optim

ROWS, DIM = 50, 6
IDS = torch.arange(ROWS)
MEMORY = TierConfig(hbm="all")
SPEC = optim.RowWiseAdagrad(
    lr=0.1, initial_accumulator_value=0.5, weight_decay=0.2, weight_decay_mode="decoupled_global"
)


def table(config: TierConfig = MEMORY, spec: Any = SPEC, **options: Any) -> Any:
    return TieredEmbedding(ROWS, DIM, config=config, optimizer=spec, seed=4, **options)


def batches(count: int = 6) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, ROWS, (8,), generator=random) for _ in range(count)]


def train(module: Any, ids: list[Tensor], prefetched: bool = False) -> None:
    for one in tierstore.prefetch(ids, module, depth=2) if prefetched else ids:
        (module(one).sin() * torch.arange(1, 9)[:, None]).sum().backward()


def everything(module: Any) -> list[Tensor]:
    return [module.rows(IDS), *module.optimizer_rows(IDS).values()]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_formula_with_a_schedule() -> None:
    """In float64: missed updates count with the rate of the update that makes up for them."""
    module = table()
    weights, sums = module.rows(IDS).double(), torch.full((ROWS,), 0.5, dtype=torch.float64)
    last = torch.zeros(ROWS, dtype=torch.int64)
    for step, ids in enumerate(batches(), start=1):
        rate = module.fused_optimizer.param_groups[0]["lr"] = 0.1 / step
        train(module, [ids])
        looked_up = weights.clone().requires_grad_()
        (looked_up[ids].sin() * torch.arange(1, 9)[:, None]).sum().backward()
        grad, rows = looked_up.grad, ids.unique()
        assert grad is not None
        keep = 1 - rate * 0.2
        weights[rows] *= (keep ** (step - last[rows] - 1).double())[:, None]
        last[rows] = step
        sums[rows] += grad[rows].square().mean(dim=1)
        weights[rows] = keep * weights[rows] - rate * grad[rows] / (sums[rows].sqrt() + 1e-8)[:, None]
    torch.testing.assert_close(module.rows(IDS).double(), weights, rtol=2e-5, atol=2e-6)
    state = module.optimizer_rows(IDS)
    assert list(state) == ["sum", "last_update"]
    assert torch.equal(state["last_update"], last.float())
    torch.testing.assert_close(state["sum"].double(), sums, rtol=2e-5, atol=2e-6)


def test_rows_of_a_batch_decay_as_decoupled() -> None:
    """Where every update has all rows, none is missed."""
    decoupled = optim.RowWiseAdagrad(
        lr=0.1, initial_accumulator_value=0.5, weight_decay=0.2, weight_decay_mode="decoupled"
    )
    ours, theirs = table(), table(spec=decoupled)
    for _ in range(3):
        for module in (ours, theirs):
            module(IDS).sin().sum().backward()
    assert torch.equal(ours.rows(IDS), theirs.rows(IDS))


def test_tiers_commits_and_prefetch_change_no_bit(tmp_path: Path) -> None:
    expected = table()
    train(expected, batches())
    tiers = TierConfig(hbm="4KiB", path=tmp_path / "store", ssd="1GiB", policy="lru")
    for part in (batches()[:3], batches()[3:]):
        with table(tiers) as found:
            train(found, part, prefetched=True)
            last = everything(found)
    same(last, everything(expected))
    for other in (optim.RowWiseAdagrad(initial_accumulator_value=0.5), optim.SGD()):
        with pytest.raises(StoreMismatchError, match="optimizer is"):
            table(TierConfig(hbm="4KiB", path=tmp_path / "store", ssd="1GiB"), other)


def test_state_dicts_go_on_from_there() -> None:
    expected, loaded = table(), table()
    train(expected, batches()[:3])
    rows, state = expected.state_dict(), expected.fused_optimizer.state_dict()
    loaded.load_state_dict(rows)
    loaded.fused_optimizer.load_state_dict(state)
    same(everything(loaded), everything(expected))
    train(expected, batches()[3:])
    train(loaded, batches()[3:])
    same(everything(loaded), everything(expected))


def test_loaded_rows_are_of_now() -> None:
    """They decay for updates after they were loaded, not for those before."""
    module = table(spec=optim.SGD(lr=1.0, weight_decay=0.5, weight_decay_mode="decoupled_global"))
    train(module, batches(4))
    assert module.fused_optimizer.num_updates == 4
    module.load_rows([7], torch.ones(1, DIM))
    assert module.optimizer_rows([7])["last_update"].tolist() == [4.0]
    (0.0 * module(torch.tensor([3]))).sum().backward()
    (0.0 * module(torch.tensor([7]))).sum().backward()
    assert module.rows([7]).tolist() == [[0.25] * DIM]
    module.load_rows([7], torch.ones(1, DIM), {"last_update": torch.tensor([3.0])})
    (0.0 * module(torch.tensor([7]))).sum().backward()
    assert module.rows([7]).tolist() == [[0.5**4] * DIM]
    module.load_rows([7], torch.ones(1, DIM), {"last_update": torch.tensor([1e9])})  # of another training
    (0.0 * module(torch.tensor([7]))).sum().backward()
    assert module.rows([7]).tolist() == [[0.5] * DIM]


def test_numbers_of_updates_need_float32() -> None:
    with pytest.raises(ConfigError, match="state_dtype='bf16' cannot hold the numbers of updates"):
        table(TierConfig(hbm="4KiB", ssd="1GiB", engine="memory", state_dtype="bf16"))
    short = TierConfig(hbm="4KiB", ssd="1GiB", engine="memory", ssd_dtype="bf16")
    with table(short) as module:
        train(module, batches())
        assert module.optimizer_rows(IDS)["last_update"].max() == 6.0


def test_the_mode_is_fixed() -> None:
    module = table()
    assert "weight_decay_mode" not in module.fused_optimizer.param_groups[0]
    with pytest.raises(ConfigError, match="use Adam for that"):
        optim.AdamW(weight_decay_mode="decoupled_global")
