"""A GradScaler and tables on a fake GPU: the bits of the CPU's rows, and of its scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.cuda.fake import fake_gpu
from tests.cuda.fake_torch import GpuTensor, fake_torch
from tests.cuda.test_modules_on_gpu import CONFIG, DIM, ROWS, ints, same
from tierstore import TieredEmbeddingBag, optim

SPECS = (optim.SGD(lr=0.001), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.05))


def trained(device: str, spec: optim.OptimizerSpec, clip: bool, wrong_at: int | None) -> list[Any]:
    """Scales, rows and their state of a training with a scaler, of which one step has no finite gradient."""
    torch.manual_seed(2)
    bag = TieredEmbeddingBag(ROWS, DIM, mode="sum", device=device, config=CONFIG, optimizer=spec)
    top = nn.Linear(DIM, 1).to(device)
    dense = torch.optim.SGD(top.parameters(), lr=0.001)
    amp = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0, growth_interval=2)
    found: list[Any] = []
    with bag:
        for step in range(6):
            dense.zero_grad()
            with tierstore.accumulate(bag) as rows:
                for part in ints(8, 5, seed=step).split(4):
                    loss = top(bag(part)).square().sum()
                    amp.scale(loss * (float("inf") if step == wrong_at else 1.0)).backward()
                if clip:
                    amp.unscale_(dense)
                    amp.unscale_(rows)
                    shown = rows.parameters()
                    assert {str(tensor.device) for tensor in shown} == {device}
                    assert all(isinstance(tensor.grad, GpuTensor) == (device != "cpu") for tensor in shown)
                    found.append(nn.utils.clip_grad_norm_([*top.parameters(), *shown], 0.5).cpu())
                amp.step(dense)
                amp.step(rows)
                amp.update()
            found.append(amp.get_scale())
        found.append(bag.fused_optimizer.num_updates)
        ids = torch.arange(ROWS)
        found += [bag.rows(ids), *bag.optimizer_rows(ids).values()]
    return found


@pytest.mark.parametrize("wrong_at", [None, 3])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_scaled_training_has_the_bits_of_the_host(
    spec: optim.OptimizerSpec, clip: bool, wrong_at: int | None
) -> None:
    expected = trained("cpu", spec, clip, wrong_at)
    with fake_torch("random", seed=6):
        found = trained("cuda:0", spec, clip, wrong_at)
        assert fake_gpu().counts["launches"] > 30
    updates = next(value for value in found if isinstance(value, int))
    assert updates == (6 if wrong_at is None else 5)
    nan_norms = [isinstance(value, Tensor) and value.dim() == 0 and bool(value.isnan()) for value in expected]
    assert any(nan_norms) == (clip and wrong_at is not None)
    keep = [number for number, is_nan in enumerate(nan_norms) if not is_nan]
    same([found[number] for number in keep], [expected[number] for number in keep])
