"""The torch-shaped view: schedulers drive it, and its state goes through a checkpoint."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

from tierstore import _core as core
from tierstore import optim
from tierstore.errors import ConfigError
from tierstore.optim import FusedOptimizer


def update_of_one(step: core.OptimizerStep) -> float:
    """What a step does to a row with weight 0 and gradient 1."""
    row, grad = np.zeros((1, 4), np.float32), np.ones(1, np.float32)
    start, zero = np.array([0, 1], np.int32), np.zeros(1, np.int32)
    args = core.UpdateArgs(dim=1, slots=zero, csr_start=start, csr_positions=zero, step=step)
    core.HostRows.view(row.view(np.uint8)).update_rows(args, grad.ctypes.data, 1)
    return float(row[0, 0])


def advanced(optimizer: FusedOptimizer) -> core.OptimizerStep:
    """The step of an optimizer with one group."""
    ((step, tables),), count = optimizer.next_step()
    count()
    assert tables is None
    return step


def test_schedulers_change_the_next_update() -> None:
    optimizer = FusedOptimizer(optim.SGD(lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            seen.append(update_of_one(advanced(optimizer)))
            scheduler.step()
    assert seen == [-1.0, -0.5, -0.25]
    optimizer.param_groups[0]["lr"] = 3.0
    assert update_of_one(advanced(optimizer)) == -3.0


def test_every_hyperparameter_is_read() -> None:
    optimizer = FusedOptimizer(optim.Adam(lr=1.0, eps=0.0))
    assert set(optimizer.param_groups[0]) >= {"lr", "betas", "eps", "weight_decay"}
    assert update_of_one(advanced(optimizer)) == pytest.approx(-1.0)
    optimizer.param_groups[0].update(eps=1.0, betas=(0.0, 0.0))
    assert update_of_one(advanced(optimizer)) == -0.5


def test_torchs_schedules_of_momentum() -> None:
    optimizer = FusedOptimizer(optim.SGD(lr=1.0, momentum=0.5))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    momenta = []
    for _ in range(3):
        momenta.append(advanced(optimizer).beta1)
        schedule.step()
    assert momenta[0] == pytest.approx(0.95)
    assert min(momenta) < 0.9
    stateless = FusedOptimizer(optim.SGD(lr=1.0))
    torch.optim.lr_scheduler.OneCycleLR(stateless, max_lr=1.0, total_steps=4)
    with pytest.raises(ConfigError, match="the rows have no momentum_buffer"):
        stateless.next_step()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_decay_mode": "L2"}, "weight_decay_mode is 'L2'; it must be one of 'l2'"),
        ({"weight_decay_mode": "decoupled_global"}, "build the tables with it, since their rows lack"),
        ({"weight_decay_mode": None, "weight_decay": 0.0}, "weight_decay_mode is None"),
        ({"lr": None}, "lr is None; it must be a finite number"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": None}, "eps is None"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"betas": None}, "betas is None"),
        ({"betas": (0.9, 1.0)}, "two numbers"),
    ],
    ids=str,
)
def test_what_a_group_cannot_hold_is_named_and_counts_no_update(changed: dict, message: str) -> None:
    optimizer = FusedOptimizer(optim.Adam(lr=1.0, weight_decay=0.1))
    optimizer.param_groups[0].update(changed)
    with pytest.raises(ConfigError, match=message):
        optimizer.next_step()
    assert optimizer.num_updates == 0


def test_step_and_zero_grad_do_nothing() -> None:
    optimizer = FusedOptimizer(optim.SGD())
    optimizer.zero_grad()
    assert optimizer.step() is None
    assert optimizer.step(lambda: 5) == 5
    assert optimizer.num_updates == 0


def test_state_goes_through_a_checkpoint() -> None:
    optimizer = FusedOptimizer(optim.Adam(lr=0.5))
    for _ in range(4):
        advanced(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    restored = FusedOptimizer(optim.Adam())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert restored.num_updates == 4
    assert update_of_one(advanced(restored)) == update_of_one(advanced(optimizer))
    assert pickle.loads(pickle.dumps(optimizer)).num_updates == 5


def test_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="adagrad"):
        FusedOptimizer(optim.Adagrad()).load_state_dict(FusedOptimizer(optim.SGD()).state_dict())
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError, match="fused sgd"):
        FusedOptimizer(optim.SGD()).load_state_dict(plain.state_dict())


def test_one_group_only() -> None:
    with pytest.raises(ConfigError, match="parameter groups of its tables"):
        FusedOptimizer(optim.SGD()).add_param_group({"params": [torch.zeros(1)]})
