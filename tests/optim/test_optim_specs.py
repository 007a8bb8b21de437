"""Specifications of fused optimizers: layouts, validation, what a store remembers, cost of the import."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore import optim
from tierstore.errors import ConfigError

ALL = [
    optim.SGD(lr=0.3, weight_decay=0.1),
    optim.RowWiseAdagrad(lr=0.2, initial_accumulator_value=0.5),
    optim.Adagrad(eps=1e-10, weight_decay_mode="decoupled"),
    optim.Adam(betas=(0.8, 0.99)),
    optim.AdamW(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.8, clip_grad_norm=1),
    optim.LarsSGD(momentum=0.8, eta=0.1),
    optim.PartialRowWiseAdam(betas=(0.8, 0.99)),
    optim.LAMB(eps=1e-6),
    optim.PartialRowWiseLAMB(weight_decay=0.1),
    optim.Adagrad(weight_decay=0.1, weight_decay_mode="decoupled_global"),
]


@pytest.mark.parametrize(
    ("spec", "floats", "row_bytes"),
    list(
        zip(
            ALL,
            (0, 1, 64, 128, 128, 64, 64, 65, 128, 65, 65),
            (256, 272, 512, 768, 768, 512, 512, 528, 768, 528, 528),
            strict=True,
        )
    ),
    ids=lambda x: getattr(x, "name", None),
)
def test_layout_of_dim_64(spec: optim.OptimizerSpec, floats: int, row_bytes: int) -> None:
    assert spec.state_floats(64) == floats == spec.step_args().state_floats(64)
    assert spec.row_bytes(64) == row_bytes


@given(st.sampled_from(ALL), st.integers(1, 300))
def test_state_columns_cover_the_state_once(spec: optim.OptimizerSpec, dim: int) -> None:
    row_bytes = spec.row_bytes(dim)
    assert row_bytes % 16 == 0
    assert 0 <= row_bytes - 4 * (dim + spec.state_floats(dim)) < 16
    covered = [c for part in spec.state_columns(dim).values() for c in range(part.start, part.stop)]
    assert covered == list(range(dim, dim + spec.state_floats(dim)))


def test_split_state_gives_named_views() -> None:
    rows = np.arange(2 * 16, dtype=np.float32).reshape(2, 16)
    adam = optim.Adam().split_state(rows, 5)
    assert list(adam) == ["exp_avg", "exp_avg_sq"]
    np.testing.assert_array_equal(adam["exp_avg_sq"], rows[:, 10:15])
    per_row = optim.RowWiseAdagrad().split_state(rows, 5)["sum"]
    assert per_row.shape == (2,)
    assert np.shares_memory(per_row, rows)
    both = optim.PartialRowWiseAdam().split_state(rows, 5)
    np.testing.assert_array_equal(both["exp_avg"], rows[:, 5:10])
    np.testing.assert_array_equal(both["exp_avg_sq"], rows[:, 10])


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.name)
def test_cut_state_is_that_of_the_columns(spec: optim.OptimizerSpec) -> None:
    rows = np.arange(2 * 20, dtype=np.float32).reshape(2, 20)
    whole = spec.split_state(rows, 6)
    cut = spec.cut_state(rows[:, 6 : 6 + spec.state_floats(6)], 6, slice(2, 5))
    parts = spec.split_state(np.hstack([np.zeros((2, 3), np.float32), cut]), 3)
    for name, part in parts.items():
        np.testing.assert_array_equal(part, whole[name] if name in spec.per_row else whole[name][:, 2:5])


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.name)
def test_dict_round_trip(spec: optim.OptimizerSpec) -> None:
    assert optim.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    again = optim.from_dict(spec.identity)
    assert again.identity == spec.identity
    assert dataclasses.replace(spec, lr=9.0).identity == spec.identity


def test_initial_state_is_identity() -> None:
    """Rows that are not stored start from it, so it may not change under them."""
    assert optim.Adagrad(initial_accumulator_value=0.1).identity != optim.Adagrad().identity
    assert optim.Adagrad(initial_accumulator_value=0.1).initial_state == 0.1


TORCHS = [
    (ours, name, parameter.default)
    for ours in optim.OPTIMIZERS.values()
    if hasattr(torch.optim, ours.__name__)
    for name, parameter in inspect.signature(getattr(torch.optim, ours.__name__)).parameters.items()
    if name != "params"
]


def test_every_optimizer_of_torchs_name_is_compared() -> None:
    assert {ours.name for ours, _, _ in TORCHS} == {"sgd", "adagrad", "adam", "adamw"}


@pytest.mark.parametrize(("ours", "name", "default"), TORCHS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_arguments_of_torchs_optimizers(ours: type[optim.OptimizerSpec], name: str, default: object) -> None:
    """Each has torch's default, or is refused by its name with what to do instead."""
    if name in {item.name for item in dataclasses.fields(ours)}:
        assert getattr(ours(), name) == default
    else:
        with pytest.raises(ConfigError, match=f"^{ours.name} has no {name}: .*(leave it out|use|negate)"):
            ours(**{name: default})


def test_weight_decay_is_that_of_torchs_class() -> None:
    modes = {name: getattr(make(), "weight_decay_mode", None) for name, make in optim.OPTIMIZERS.items()}
    assert modes.pop("adamw") == modes.pop("partial_rowwise_adam") == "decoupled"
    assert {modes.pop(name) for name in ("lars_sgd", "lamb", "partial_rowwise_lamb")} == {None}
    assert set(modes.values()) == {"l2"}


def test_momentum_is_chosen_by_torchs_argument() -> None:
    with_momentum = optim.SGD(lr=0.1, momentum=0.9)
    assert (with_momentum.name, with_momentum.state_names) == ("momentum_sgd", ("momentum_buffer",))
    assert optim.SGD(lr=0.1, momentum=0.0) == optim.SGD(lr=0.1)
    assert optim.make("momentum_sgd", lr=0.1) == with_momentum
    assert dataclasses.replace(with_momentum, momentum=0.5) == optim.SGD(lr=0.1, momentum=0.5)
    assert copy.deepcopy(with_momentum) == pickle.loads(pickle.dumps(with_momentum)) == with_momentum


def test_rows_of_adamw_are_adams() -> None:
    assert optim.AdamW().identity == optim.Adam().identity
    assert optim.make("adamw") == optim.AdamW()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGD(lr=-1), "lr is -1"),
        (lambda: optim.SGD(lr=float("nan")), "lr"),
        (lambda: optim.SGD(lr="0.1"), "lr is '0.1'"),
        (lambda: optim.Adagrad(eps=-1e-9), "eps"),
        (lambda: optim.Adagrad(initial_accumulator_value=-1), "initial_accumulator_value"),
        (lambda: optim.RowWiseAdagrad(weight_decay=float("inf")), "weight_decay"),
        (lambda: optim.Adam(betas=(0.9, 1.0)), "betas"),
        (lambda: optim.Adam(betas=0.9), "betas"),
        (lambda: optim.SGD(weight_decay_mode="L2"), "one of 'l2', 'decoupled', 'decoupled_global'"),
        (lambda: optim.make("newton"), "known optimizers: sgd"),
        (lambda: optim.make("sgd", eps=1), "sgd has no eps: it has lr, momentum"),
        (lambda: optim.SGD(momentum=-0.9), "momentum is -0.9"),
        (lambda: optim.SGD(momentum="0.9"), "momentum is '0.9'"),
        (lambda: optim.SGD(momentum=0.9, dampening=-1), "dampening is -1"),
        (lambda: optim.SGD(momentum=0.9, nesterov=1), "nesterov is 1; it must be True or False"),
        (lambda: optim.SGD(nesterov=True), "nesterov needs a momentum above 0"),
        (lambda: optim.SGD(momentum=0.9, dampening=0.1, nesterov=True), "and no dampening"),
        (lambda: optim.make("momentum_sgd", momentum=0), "use SGD without it"),
        (lambda: optim.SGD(clip_grad_norm=0), "clip_grad_norm is 0; it must be above 0, or None"),
        (lambda: optim.Adam(clip_grad_value=-1.0), "clip_grad_value is -1.0"),
        (lambda: optim.Adam(clip_grad_value="1"), "clip_grad_value is '1'; it must be a finite number"),
        (lambda: optim.LAMB(clip_grad_norm=float("nan")), "clip_grad_norm is nan"),
        (lambda: optim.Adagrad(momentum=0.9), "adagrad has no momentum: it has lr"),
        (lambda: optim.LarsSGD(eta=-1), "eta is -1"),
        (lambda: optim.LAMB(betas=(0.9, 1)), "betas"),
        (lambda: optim.LAMB(weight_decay_mode="l2"), "lamb has no weight_decay_mode"),
        (lambda: optim.SGD(0.1, 0.9), "weight_decay_mode, clip_grad_norm, clip_grad_value by name"),
        (lambda: optim.AdamW(weight_decay_mode="l2"), "use Adam"),
        (lambda: optim.from_dict({"lr": 1}), "needs a name"),
        (lambda: optim.SGD().row_bytes(0), "embedding_dim"),
    ],
)
def test_wrong_values_are_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_import_needs_no_torch() -> None:
    code = "import sys, tierstore.optim; assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
