"""Specifications of fused optimizers: layouts, validation, what a store remembers, cost of the import."""

from __future__ import annotations

import dataclasses
import inspect
import json
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
]


@pytest.mark.parametrize(
    ("spec", "floats", "row_bytes"),
    [(ALL[0], 0, 256), (ALL[1], 1, 272), (ALL[2], 64, 512), (ALL[3], 128, 768), (ALL[4], 128, 768)],
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
    assert modes.pop("adamw") == "decoupled"
    assert set(modes.values()) == {"l2"}


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
        (lambda: optim.SGD(weight_decay_mode="L2"), "'l2' or 'decoupled'"),
        (lambda: optim.make("lamb"), "known optimizers: sgd"),
        (lambda: optim.make("sgd", eps=1), "sgd has no eps: it has lr, weight_decay"),
        (lambda: optim.make("sgd", momentum=0.9), "rows keep no momentum"),
        (lambda: optim.SGD(0.1, 0.9), "weight_decay_mode by name"),
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
