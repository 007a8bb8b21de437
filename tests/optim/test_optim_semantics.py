"""Training with the fused optimizers against a float64 reference, torch.optim and fbgemm."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from tierstore import _core as core
from tierstore import optim
from tierstore.optim import OptimizerSpec

ROWS, DIM, STEPS = 40, 12, 6
SOME_ROWS, ALL_ROWS = 16, 160
"""Bags of a batch that touches some rows, and of one that touches all."""
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batches(bags: int = SOME_ROWS, scale: float = 1.0) -> list[Batch]:
    """(ids int64, offsets int64, gradient of the pooled bags), with many duplicates and some empty bags."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        lengths = rng.integers(0, 6, bags)
        ids = rng.integers(0, ROWS, lengths.sum())
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        made.append((ids, offsets, (scale * rng.standard_normal((bags, DIM))).astype(np.float32)))
    return made


def initial_weights() -> np.ndarray:
    return np.random.default_rng(99).standard_normal((ROWS, DIM)).astype(np.float32)


def train(
    spec: OptimizerSpec, bags: int = SOME_ROWS, scale: float = 1.0
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Weights and state after STEPS batches of sum-pooled bags through the native core."""
    rows = np.zeros((ROWS, spec.row_bytes(DIM) // 4), np.float32)
    rows[:, :DIM] = initial_weights()
    rows[:, DIM : DIM + spec.state_floats(DIM) - spec.decays_all] = spec.initial_state
    zero, stride = np.zeros(1, np.int64), np.full(1, DIM, np.int64)
    for step, (ids, offsets, grad) in enumerate(batches(bags, scale), start=1):
        unique, inverse = np.unique(ids, return_inverse=True)
        start, positions = core.build_csr(inverse.astype(np.int32), len(unique))
        grouped = core.Bags(
            offsets=offsets, bag_start=np.array([0, bags]), out_offset=zero, out_stride=stride,
            modes=np.zeros(1, np.uint8),
        )  # fmt: skip
        args = core.UpdateArgs(
            dim=DIM, slots=unique.astype(np.int32), csr_start=start, csr_positions=positions,
            step=spec.step_args(step=step),
        )  # fmt: skip
        core.HostRows.view(rows.view(np.uint8)).update_pooled(args, grouped, grad.ctypes.data)
    return rows[:, :DIM], spec.split_state(rows, DIM)


def dense_gradient(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(touched rows, float64 (ROWS, DIM) gradient)."""
    ids, offsets, grad = batch
    dense = np.zeros((ROWS, DIM))
    np.add.at(dense, ids, np.repeat(grad, np.diff(offsets), axis=0).astype(np.float64))
    return np.unique(ids), dense


def norm_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The quotient of norms (n,), 1 where one of them is 0, as (n, 1)."""
    usable = (above > 0) & (below > 0)
    return np.where(usable, above / np.where(usable, below, 1.0), 1.0)[:, None]


def moments(spec: Any, state: dict[str, np.ndarray], rows: np.ndarray, g: np.ndarray, step: int) -> Any:
    """Adam's change without lr; ``exp_avg_sq`` may be one per row."""
    b1, b2 = spec.betas
    squares = (g * g).mean(axis=1) if "exp_avg_sq" in spec.per_row else g * g
    m = state["exp_avg"][rows] = b1 * state["exp_avg"][rows] + (1 - b1) * g
    v = state["exp_avg_sq"][rows] = b2 * state["exp_avg_sq"][rows] + (1 - b2) * squares
    below = np.sqrt(v / (1 - b2**step)) + spec.eps
    return (m / (1 - b1**step)) / (below if below.ndim == 2 else below[:, None])


def momentum(spec: Any, state: dict[str, np.ndarray], rows: np.ndarray, g: np.ndarray, step: int) -> Any:
    """torch's SGD with momentum."""
    kept = 1.0 if step == 1 else 1 - spec.dampening
    buffer = state["momentum_buffer"][rows] = spec.momentum * state["momentum_buffer"][rows] + kept * g
    return g + spec.momentum * buffer if spec.nesterov else buffer


def change_of(
    spec: Any, state: dict[str, np.ndarray], rows: np.ndarray, w: np.ndarray, g: np.ndarray, step: int
) -> np.ndarray:
    """What is taken off the weights ``w`` of the touched ``rows``."""
    if isinstance(spec, optim.LarsSGD):
        weights, grads = np.linalg.norm(w, axis=1), np.linalg.norm(g, axis=1)
        rate = spec.lr * spec.eta * norm_ratio(weights, grads + spec.weight_decay * weights)
        buffer = state["momentum_buffer"][rows]
        buffer = state["momentum_buffer"][rows] = spec.momentum * buffer + rate * (g + spec.weight_decay * w)
        return buffer
    if isinstance(spec, optim.LAMB):
        change = moments(spec, state, rows, g, step) + spec.weight_decay * w
        return spec.lr * norm_ratio(np.linalg.norm(w, axis=1), np.linalg.norm(change, axis=1)) * change
    if isinstance(spec, optim.Adam):
        return spec.lr * moments(spec, state, rows, g, step)
    if isinstance(spec, optim.RowWiseAdagrad):
        state["sum"][rows] += (g * g).mean(axis=1)
        return spec.lr / (np.sqrt(state["sum"][rows]) + spec.eps)[:, None] * g
    if isinstance(spec, optim.Adagrad):
        state["sum"][rows] += g * g
        return spec.lr * g / (np.sqrt(state["sum"][rows]) + spec.eps)
    return spec.lr * (momentum(spec, state, rows, g, step) if spec.own_state else g)


def clipped(spec: Any, g: np.ndarray) -> np.ndarray:
    """By torch's functions, row by row."""
    found = []
    for row in torch.from_numpy(g):
        parameter = torch.nn.Parameter(torch.zeros_like(row))
        parameter.grad = row.clone()
        if spec.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_([parameter], spec.clip_grad_value)
        if spec.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], spec.clip_grad_norm)
        found.append(parameter.grad.numpy())
    return np.stack(found)


def reference(spec: OptimizerSpec) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same in float64, straight from the formulas; the state of untouched rows is that of the start."""
    w = initial_weights().astype(np.float64)
    state = {
        name: np.full(spec.state_shape(name, ROWS, DIM), spec.initial_state) for name in spec.state_names
    }
    lr, decay = spec.lr, spec.weight_decay
    mode = getattr(spec, "weight_decay_mode", "own")
    if spec.decays_all:
        state["last_update"][:] = 0.0
    for step, batch in enumerate(batches(), start=1):
        rows, dense = dense_gradient(batch)
        if spec.decays_all:
            missed = step - state["last_update"][rows] - 1
            w[rows] *= (1 - lr * decay) ** missed[:, None]
            state["last_update"][rows] = step
        g = clipped(spec, dense[rows]) + (decay * w[rows] if mode == "l2" else 0.0)
        keep = 1.0 - lr * decay if mode.startswith("decoupled") else 1.0
        w[rows] = keep * w[rows] - change_of(spec, state, rows, w[rows], g, step)
    return w, state


SPECS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, weight_decay=0.05),
    optim.SGD(lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled"),
    optim.RowWiseAdagrad(lr=0.1),
    optim.RowWiseAdagrad(lr=0.1, eps=0.1, weight_decay=0.05, initial_accumulator_value=0.3),
    optim.RowWiseAdagrad(lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled"),
    optim.Adagrad(lr=0.1),
    optim.Adagrad(lr=0.1, eps=0.1, weight_decay=0.05, initial_accumulator_value=0.3),
    optim.Adagrad(lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled"),
    optim.Adam(lr=0.1),
    optim.Adam(lr=0.1, betas=(0.5, 0.9), eps=0.1, weight_decay=0.05),
    optim.Adam(lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled"),
    optim.AdamW(lr=0.1, betas=(0.5, 0.9), eps=0.1, weight_decay=0.05),
    optim.SGD(lr=0.1, momentum=0.9),
    optim.SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.05),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05, weight_decay_mode="decoupled"),
    optim.LarsSGD(lr=0.1),
    optim.LarsSGD(lr=10.0, momentum=0.5, eta=0.01, weight_decay=0.05),
    optim.PartialRowWiseAdam(lr=0.1),
    optim.PartialRowWiseAdam(lr=0.1, betas=(0.5, 0.9), eps=0.1, weight_decay=0.05),
    optim.PartialRowWiseAdam(lr=0.1, weight_decay=0.05, weight_decay_mode="l2"),
    optim.LAMB(lr=0.1),
    optim.LAMB(lr=0.1, betas=(0.5, 0.9), eps=0.1, weight_decay=0.05),
    *(
        kind(lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled_global", **more)
        for kind, more in (
            (optim.SGD, {}),
            (optim.SGD, {"momentum": 0.9}),
            (optim.RowWiseAdagrad, {"initial_accumulator_value": 0.3}),
            (optim.Adagrad, {}),
            (optim.Adam, {"clip_grad_norm": 2.0}),
            (optim.PartialRowWiseAdam, {}),
        )
    ),
    optim.SGD(lr=0.1, clip_grad_norm=2.0, weight_decay=0.05),
    optim.RowWiseAdagrad(lr=0.1, clip_grad_value=1.0),
    optim.Adam(lr=0.1, clip_grad_norm=3.0, clip_grad_value=1.5),
    optim.PartialRowWiseLAMB(lr=0.1),
    optim.PartialRowWiseLAMB(lr=0.1, betas=(0.5, 0.9), eps=0.1, weight_decay=0.05),
]


def describe(spec: OptimizerSpec) -> str:
    changed = {k: v for k, v in spec.to_dict().items() if k != "lr" and v != getattr(type(spec), k, None)}
    return "-".join(map(str, [spec.name, *changed.values()]))


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_float64_reference(spec: OptimizerSpec) -> None:
    weights, state = train(spec)
    expected, expected_state = reference(spec)
    np.testing.assert_allclose(weights, expected, rtol=3e-5, atol=3e-6)
    for name, value in expected_state.items():
        np.testing.assert_allclose(state[name], value, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(
    "spec",
    [optim.LarsSGD(lr=0.1, eta=0.5), optim.LAMB(lr=0.1), optim.PartialRowWiseLAMB(lr=0.1)],
    ids=lambda spec: spec.name,
)
def test_rows_and_gradients_of_zeros(spec: OptimizerSpec) -> None:
    """fbgemm never updates rows of zeros, and divides by zero where a gradient is zero."""
    rows = np.zeros((2, spec.row_bytes(DIM) // 4), np.float32)
    rows[1, :DIM] = 1.0
    grad = np.zeros((2, DIM), np.float32)
    grad[0] = 1.0
    start, both = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
    args = core.UpdateArgs(dim=DIM, slots=both, csr_start=start, csr_positions=both, step=spec.step_args())
    core.HostRows.view(rows.view(np.uint8)).update_rows(args, grad.ctypes.data, DIM)
    np.testing.assert_allclose(rows[0, :DIM], -0.1 * getattr(spec, "eta", 1.0), rtol=1e-5)
    np.testing.assert_array_equal(rows[1, :DIM], 1.0)


def compare_with(make: Callable, given: dict[str, Any], spec: OptimizerSpec, scale: float = 1.0) -> None:
    """With ``make(parameters, **given)`` in float64, which updates all rows: so do these batches."""
    assert all(len(dense_gradient(batch)[0]) == ROWS for batch in batches(ALL_ROWS))
    parameter = torch.nn.Parameter(torch.from_numpy(initial_weights()).double())
    optimizer = make([parameter], **given)
    for batch in batches(ALL_ROWS, scale):
        parameter.grad = torch.from_numpy(dense_gradient(batch)[1])
        optimizer.step()
    weights, _ = train(spec, ALL_ROWS, scale)
    np.testing.assert_allclose(weights, parameter.detach().numpy(), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_weight_decay_of_all_rows_is_that_of_dense_parameters(kind: str) -> None:
    """Where gradients do not depend on the weights, and an update touches every row in the end."""
    spec = optim.make(kind, lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled_global")
    plain = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[kind]
    parameter = torch.nn.Parameter(torch.from_numpy(initial_weights()).double())
    optimizer = plain([parameter], lr=0.1)
    made = batches()
    everyone = np.arange(ROWS), np.arange(ROWS + 1), np.ones((ROWS, DIM), np.float32)
    for batch in [*made, everyone]:
        parameter.grad = torch.from_numpy(dense_gradient(batch)[1])
        parameter.data *= 1 - 0.1 * 0.05
        optimizer.step()
    rows = np.zeros((ROWS, spec.row_bytes(DIM) // 4), np.float32)
    rows[:, :DIM] = initial_weights()
    for step, batch in enumerate([*made, everyone], start=1):
        touched, dense = dense_gradient(batch)
        count = len(touched)
        start, own = np.arange(count + 1, dtype=np.int32), np.arange(count, dtype=np.int32)
        grad = dense[touched].astype(np.float32)
        args = core.UpdateArgs(
            dim=DIM, slots=touched.astype(np.int32), csr_start=start, csr_positions=own,
            step=spec.step_args(step),
        )  # fmt: skip
        core.HostRows.view(rows.view(np.uint8)).update_rows(args, grad.ctypes.data, DIM)
    np.testing.assert_allclose(rows[:, :DIM], parameter.detach().numpy(), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("missed", [0, 1, 2, 1023, 10**6, 2**24 - 2])
def test_any_number_of_missed_updates(missed: int) -> None:
    keep = 1 - 1e-7
    step = core.OptimizerStep(kind=0, lr=0.0, step=missed + 1).decaying_all(keep)
    row, grad, zero = np.ones((1, 4), np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    row[0, 1] = 0.0
    start = np.array([0, 1], np.int32)
    args = core.UpdateArgs(dim=1, slots=zero, csr_start=start, csr_positions=zero, step=step)
    core.HostRows.view(row.view(np.uint8)).update_rows(args, grad.ctypes.data, 1)
    np.testing.assert_allclose(row[0], [np.exp(missed * np.log1p(-1e-7)), missed + 1, 1, 1], rtol=1e-6)


def of_torch(name: str) -> tuple[Callable, type[OptimizerSpec]]:
    return getattr(torch.optim, name), getattr(optim, name)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8, 1e-10], ids="gradients_of_{}".format)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
def test_defaults_are_torchs(name: str, scale: float) -> None:
    """Small gradients tell one ``eps`` from another."""
    theirs, ours = of_torch(name)
    compare_with(theirs, {}, ours(), scale)
    compare_with(theirs, {"weight_decay": 0.05}, ours(weight_decay=0.05), scale)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SGD", {"lr": 0.1, "weight_decay": 0.05}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.05}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
        ("Adagrad", {"lr": 0.1, "eps": 0.1, "weight_decay": 0.05, "initial_accumulator_value": 0.3}),
        ("Adam", {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.05}),
        ("Adam", {"lr": 0.1, "betas": (0.0, 0.0), "eps": 1e-8}),
        ("AdamW", {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.05}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.0}),
    ],
    ids=str,
)
def test_torch_optim(name: str, given: dict[str, Any]) -> None:
    theirs, ours = of_torch(name)
    compare_with(theirs, given, ours(**given))


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.1, "eps": 1e-8},
        {"lr": 0.1, "eps": 0.1, "weight_decay": 0.05, "initial_accumulator_value": 0.3},
    ],
    ids=str,
)
def test_torchrecs_rowwise_adagrad(given: dict[str, Any]) -> None:
    theirs = import_module("torchrec.optim.rowwise_adagrad").RowWiseAdagrad
    compare_with(theirs, given, optim.RowWiseAdagrad(**given))


def fbgemm_table(spec: OptimizerSpec) -> Any:
    """A table of fbgemm on the CPU with the same optimizer, weights and state."""
    config = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    kind = {
        "sgd": config.EXACT_SGD,
        "adagrad": config.EXACT_ADAGRAD,
        "rowwise_adagrad": config.EXACT_ROWWISE_ADAGRAD,
    }
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=kind[spec.name],
        learning_rate=spec.lr,
        **({} if spec.name == "sgd" else {"eps": spec.eps}),
    )
    table.split_embedding_weights()[0].copy_(torch.from_numpy(initial_weights()))
    for state in table.get_optimizer_state():
        for value in state.values():
            value.fill_(spec.initial_state)
    return table


@pytest.mark.parametrize(
    "spec",
    [
        optim.SGD(lr=0.1),
        optim.Adagrad(lr=0.1),
        optim.Adagrad(lr=0.1, eps=0.1, initial_accumulator_value=0.3),
        optim.RowWiseAdagrad(lr=0.1),
        optim.RowWiseAdagrad(lr=0.1, eps=0.1, initial_accumulator_value=0.3),
    ],
    ids=describe,
)
def test_fbgemm(spec: OptimizerSpec) -> None:
    """Its exact optimizers, as far as it has them on the CPU: no Adam, and weight decay is ignored there."""
    table = fbgemm_table(spec)
    for ids, offsets, grad in batches():
        table(torch.from_numpy(ids), torch.from_numpy(offsets)).backward(torch.from_numpy(grad))
    weights, state = train(spec)
    np.testing.assert_allclose(weights, table.split_embedding_weights()[0].numpy(), rtol=3e-5, atol=3e-6)
    theirs = {name: value.numpy() for part in table.get_optimizer_state() for name, value in part.items()}
    assert set(theirs) == set(state)
    for name, value in theirs.items():
        np.testing.assert_allclose(state[name], value.reshape(state[name].shape), rtol=3e-5, atol=3e-6)
