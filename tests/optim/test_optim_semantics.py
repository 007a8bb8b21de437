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
    rows[:, DIM : DIM + spec.state_floats(DIM)] = spec.initial_state
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


def reference(spec: OptimizerSpec) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same in float64, straight from the formulas."""
    w = initial_weights().astype(np.float64)
    width = () if spec.state_per_row else (DIM,)
    state = {name: np.full((ROWS, *width), spec.initial_state) for name in spec.state_names}
    lr, decay = spec.lr, spec.weight_decay
    for step, batch in enumerate(batches(), start=1):
        rows, dense = dense_gradient(batch)
        g = dense[rows]
        keep = 1.0
        if spec.weight_decay_mode == "l2":
            g = g + decay * w[rows]
        else:
            keep = 1.0 - lr * decay
        if isinstance(spec, optim.SGD):
            change = lr * g
        elif isinstance(spec, optim.RowWiseAdagrad):
            state["sum"][rows] += (g * g).mean(axis=1)
            change = lr / (np.sqrt(state["sum"][rows]) + spec.eps)[:, None] * g
        elif isinstance(spec, optim.Adagrad):
            state["sum"][rows] += g * g
            change = lr * g / (np.sqrt(state["sum"][rows]) + spec.eps)
        else:
            assert isinstance(spec, optim.Adam)
            b1, b2 = spec.betas
            m = state["exp_avg"][rows] = b1 * state["exp_avg"][rows] + (1 - b1) * g
            v = state["exp_avg_sq"][rows] = b2 * state["exp_avg_sq"][rows] + (1 - b2) * g * g
            change = lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + spec.eps)
        w[rows] = keep * w[rows] - change
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
