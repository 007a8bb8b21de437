"""Exported and compiled models with tables on a fake GPU. torch without CUDA traces no gradients there, and
dynamo takes no fake tensors of ours as weights; so these graphs read, and trained ones are for silicon
(test_training_on_gpu.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from tests.cuda.fake_torch import FakeCuda, fake_torch
from tests.cuda.test_modules_on_gpu import ADAM, CONFIG, DIM, ROWS, collection, ints, keyed
from tierstore import EmbeddingCollection, EmbeddingConfig, TieredEmbedding, TieredEmbeddingBag
from tierstore.modules import lookup_ops
from tierstore.sparse import KeyedJaggedTensor


@contextmanager
def running() -> Iterator[None]:
    """Let operators of ours, which torch runs without its modes, see the fake GPU."""

    def on_gpu(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def runs(*given: Any, **more: Any) -> Any:
            with FakeCuda():
                return run(*given, **more)

        return runs

    with ExitStack() as stack:
        for name in ("_pool", "_look_up"):
            stack.enter_context(mock.patch.object(lookup_ops, name, on_gpu(getattr(lookup_ops, name))))
        yield


@contextmanager
def tracing() -> Iterator[None]:
    """Let torch trace for a GPU that it is not built for."""
    torch._dynamo.reset()
    with mock.patch.object(torch.cuda, "is_available", return_value=False), _pop_mode_temporarily():
        yield


class Keyed(nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        found = self.tables(KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
        return found["a"].values() if isinstance(found, dict) else found.values()


def parts_of(step: int) -> tuple[Tensor, ...]:
    jagged = keyed(step)
    return jagged.values(), jagged.lengths()


def sequences(device: str) -> EmbeddingCollection:
    tables = [EmbeddingConfig(ROWS, DIM, "t", feature_names=["a", "b"])]
    return EmbeddingCollection(tables, device, config=CONFIG, optimizer=ADAM)


MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "rows": (
        lambda device: TieredEmbedding(ROWS, DIM, device=device, config=CONFIG, optimizer=ADAM),
        lambda step: (ints(4, 3, seed=step),),
    ),
    "bag": (
        lambda device: TieredEmbeddingBag(ROWS, DIM, device=device, config=CONFIG, optimizer=ADAM),
        lambda step: (ints(4, 3, seed=step),),
    ),
    "collection": (lambda device: Keyed(collection(device=device)), parts_of),
    "sequences": (lambda device: Keyed(sequences(device)), parts_of),
}


def tables_of(model: nn.Module) -> Any:
    return model.tables if isinstance(model, Keyed) else model


NODES = ["tierstore.pooled.default", "tierstore.rows.default"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_lookup_is_one_node_on_the_gpu(name: str, strict: bool) -> None:
    make, inputs = MODELS[name]
    shapes = ({0: torch.export.Dim.AUTO}, None)[: len(inputs(0))]
    with fake_torch("random", seed=1, devices=2):
        model = make("cuda:1").eval()
        with tables_of(model):
            with tracing():
                program = torch.export.export(model, inputs(0), dynamic_shapes=shapes, strict=strict)
            (node,) = [node for node in program.graph.nodes if "tierstore" in str(node.target)]
            made = node.meta["val"]
            assert str(node.target) in NODES
            assert (made if isinstance(made, Tensor) else made[0][0]).device == torch.device("cuda:1")
            for step in range(3):
                expected = model(*inputs(step))
                with running():
                    found = program.module()(*inputs(step))
                assert found.device == expected.device == torch.device("cuda:1")
                assert torch.equal(found.cpu(), expected.cpu())


def test_an_exported_model_has_dense_layers_on_the_gpu() -> None:
    """It has no copy of the rows."""
    with fake_torch("random", seed=1), MODELS["bag"][0]("cuda:0") as bag:
        model = nn.Sequential(bag, nn.Linear(DIM, 2).to("cuda:0").requires_grad_(False)).eval()
        ids = ints(4, 3)
        with tracing():
            program = torch.export.export(model, (ids,), strict=False)
        assert sum(value.numel() for value in program.state_dict.values()) == 2 * DIM + 2
        bag.load_rows(torch.arange(ROWS), torch.rand(ROWS, DIM))
        with running():
            found = program.module()(ids)
        assert torch.equal(found.cpu(), model(ids).cpu())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph(name: str) -> None:
    make, inputs = MODELS[name]
    with fake_torch("random", seed=1):
        model = make("cuda:0").eval()
        with tables_of(model), torch.no_grad():
            expected = [model(*inputs(step)).square().sum().cpu() for step in range(3)]
            with running(), tracing():
                compiled = torch.compile(
                    lambda *given: model(*given).square().sum(), backend="aot_eager", fullgraph=True
                )
                found = [compiled(*inputs(step)).cpu() for step in range(3)]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
