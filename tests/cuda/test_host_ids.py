"""Ids in plain tensors of a batch stay on the host, which plans lookups, while dense tensors are copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.cuda import fake_torch as fakes
from tests.cuda.fake_streams import fake_streams
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import ADAM, CONFIG, DIM, ROWS, collection, ints, said_once, same
from tierstore import PrefetchPipeline, TieredEmbeddingBag, offload
from tierstore.modules import base
from tierstore.pipeline.host_ids import HostIds
from tierstore.sparse import KeyedJaggedTensor

STEPS = 8
__all__ = ["said_once"]


class Plain(NamedTuple):
    ids: Tensor
    offsets: Tensor
    dense: Tensor
    label: Tensor


@dataclass(frozen=True)
class Own:
    """Moves itself, ids included."""

    ids: Tensor
    offsets: Tensor
    dense: Tensor
    label: Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        moved = (part.to(device, non_blocking=non_blocking) for part in vars(self).values())
        return type(self)(*moved)


class Named(dict):  # type: ignore[type-arg]
    def __init__(self, *parts: Tensor) -> None:
        super().__init__(zip(Plain._fields, parts, strict=True))

    ids = property(lambda self: self["ids"])
    offsets = property(lambda self: self["offsets"])
    dense = property(lambda self: self["dense"])
    label = property(lambda self: self["label"])


torch.utils._pytree.register_pytree_node(
    Named, lambda one: (list(one.values()), None), lambda parts, _: Named(*parts)
)
KINDS: dict[str, Callable[..., Any]] = {"tuple": Plain, "object": Own, "dict": Named}


class Model(nn.Module):
    def __init__(self, device: str | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = TieredEmbeddingBag(
            ROWS, DIM, mode="sum", device=device, config=CONFIG, optimizer=ADAM, padding_idx=3
        )
        self.top = nn.Linear(3, 1).to(device or "cpu")

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled = self.bag(batch.ids, batch.offsets)
        out = (self.top(batch.dense).sum(1) + pooled.square().sum(1)) * batch.label
        return out.sum(), out


def batches(kind: str) -> Iterator[Any]:
    for step in range(STEPS):
        dense = torch.full((4, 3), float(step))
        yield KINDS[kind](ints(20, seed=step), torch.tensor([0, 5, 5, 11]), dense, torch.arange(4))


@contextmanager
def moves() -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Yield the copies between the host and a GPU that torch is asked for: where to, shape and dtype."""
    found: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    plain = fakes.moved

    def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        if tensor.device.type != device.type:
            found.append((device.type, tuple(tensor.shape), tensor.dtype))
        return plain(tensor, device, dtype)

    with mock.patch.object(fakes, "moved", moved):
        yield found


def trained(kind: str, device: str | None, by: str, **more: Any) -> tuple[list[Any], list[bool]]:
    """Outputs and rows, and of each step whether its lookup was made ahead."""
    ahead: list[bool] = []
    find = base.find_ahead

    def finds(*given: Any) -> Any:
        lookup = find(*given)
        ahead.append(lookup is not None)
        return lookup

    model = Model(device)
    optimizer = torch.optim.SGD(model.top.parameters(), 1e-3)
    more = {"depth": 2, "window": 3, **more}
    pipeline = PrefetchPipeline(model, optimizer, device or "cpu", **more)
    found = []
    with mock.patch.object(base, "find_ahead", finds):
        if by == "pipeline":
            source = batches(kind)
            found = [pipeline.progress(source).detach().cpu() for _ in range(STEPS)]
            pipeline.close()
        else:
            for batch in tierstore.prefetch(list(batches(kind)), model, device=device, **more):
                found.append(pipeline.step(batch).detach().cpu())
    found += [value.detach().cpu() for value in model.state_dict().values()]
    model.bag.close()
    return found, ahead


GIVEN = {"bag": lambda batch: (batch.ids, batch.offsets)}


@pytest.mark.parametrize("by", ["pipeline", "prefetch"])
@pytest.mark.parametrize("inputs", [GIVEN, None], ids=["given", "learned"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_stay_on_the_host(kind: str, inputs: Any, by: str, caplog: pytest.LogCaptureFixture) -> None:
    """No copy of them comes back, and each lookup that was made ahead is used; labels are integers as well.

    The batch from which it is learned what is looked up is moved as a whole.
    """
    expected, _ = trained(kind, None, by, inputs=inputs)
    with fake_torch("random", seed=3), fake_streams() as streams, moves() as copies:
        found, ahead = trained(kind, "cuda:0", by, inputs=inputs)
        assert streams.wrong == []
    same(found, expected)
    learns = int(inputs is None)
    assert ahead == [True] * (STEPS - learns)
    up = [shape for where, shape, dtype in copies if where == "cuda" and dtype == torch.int64]
    down = [shape for where, shape, dtype in copies if where == "cpu" and dtype == torch.int64]
    assert down.count((20,)) == learns
    assert up.count((20,)) == (STEPS if kind == "object" else learns)  # such an object moves itself
    assert down.count((4,)) == learns  # offsets, and no labels
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


class Joined(nn.Module):
    """Makes a keyed jagged tensor of plain tensors of the batch, of which it takes ``bounds``: "lengths" or
    "offsets"; ``weights`` are its too."""

    def __init__(self, device: str | None, bounds: str, weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = collection(weighted, device)
        self.top = nn.Linear(3, 1).to(device or "cpu")
        self.bounds, self.weighted = bounds, weighted

    def features(self, batch: Any) -> KeyedJaggedTensor:
        more = {"weights": batch["weights"]} if self.weighted else {}
        return KeyedJaggedTensor(["a", "b"], batch["ids"], **{self.bounds: batch[self.bounds]}, **more)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled = self.bags(self.features(batch)).values().square().sum(1)
        out = (self.top(batch["dense"]).sum(1) + pooled) * batch["label"]
        return out.sum(), out


def plain_batches() -> Iterator[dict[str, Tensor]]:
    """The second batch has no ids."""
    for step in range(STEPS):
        lengths = ints(8, seed=step, below=5) * (step != 1)
        n = int(lengths.sum())
        yield {
            "ids": ints(n, seed=step), "lengths": lengths, "dense": torch.full((4, 3), float(step)),
            "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            "weights": torch.linspace(0, 1, n), "label": torch.arange(4),
        }  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "frozen", "eval"])
@pytest.mark.parametrize("inputs", ["given", "learned"])
@pytest.mark.parametrize(("bounds", "weighted"), [("lengths", False), ("offsets", False), ("offsets", True)])
def test_parts_of_a_keyed_jagged_tensor_stay_together(
    bounds: str, weighted: bool, inputs: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether their lookups are made ahead, or by the forward call alone."""

    def run(device: str | None) -> list[Tensor]:
        model = Joined(device, bounds, weighted).train(mode != "eval")
        if mode == "frozen":
            model.bags.requires_grad_(False)
        given = {"bags": lambda batch: model.features(batch)} if inputs == "given" else None
        pipeline = PrefetchPipeline(model, None, device or "cpu", depth=2, window=3, inputs=given)
        source = plain_batches()
        found = [pipeline.progress(source).detach().cpu() for _ in range(STEPS)]
        pipeline.close()
        found += [value.detach().cpu() for value in model.state_dict().values()]
        model.bags.close()
        return found

    expected = run(None)
    caplog.clear()
    with fake_torch("random", seed=3), fake_streams() as streams, moves() as copies:
        found = run("cuda:0")
        assert streams.wrong == []
    same(found, expected)
    assert "ids" not in caplog.text.replace("is not prefetched", "")
    down = [shape for where, shape, dtype in copies if where == "cpu" and dtype == torch.int64]
    assert len(down) <= 2 * (inputs == "learned")  # of the first batch


@pytest.mark.parametrize("kind", KINDS)
def test_ids_stay_on_the_host_in_an_evaluation(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first batch shows what is looked up, though nothing is trained."""

    def run(device: str | None) -> list[Tensor]:
        model = Model(device).eval()
        pipeline = PrefetchPipeline(model, None, device or "cpu", depth=2, window=3)
        source = batches(kind)
        found = [pipeline.progress(source).cpu() for _ in range(STEPS)]
        pipeline.close()
        model.bag.close()
        return found

    expected = run(None)
    with fake_torch("random", seed=3), fake_streams() as streams, moves() as copies:
        same(run("cuda:0"), expected)
        assert streams.wrong == []
    down = [shape for where, shape, dtype in copies if where == "cpu" and dtype == torch.int64]
    assert sorted(down) == [(4,), (20,)]  # of the first batch
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


class Columns(nn.Module):
    """Plain layers of torch, each of which has a column of the ids."""

    def __init__(self, from_column: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(4))
        self.from_column = from_column

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        ids = batch[:, self.from_column :]
        rows = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        out = torch.stack(rows).square().sum()
        if self.from_column:
            out = out + batch[:, 0].to(out.device).sum()
        return out, out


@pytest.mark.parametrize("from_column", [0, 1])
def test_columns_stay_if_all_are_looked_up(from_column: int) -> None:
    """A column that the model computes with goes to the GPU, and so do the others of its tensor."""
    results = []
    for device in (None, "cuda:0"):
        with fake_torch("random", seed=3) if device else nullcontext(), moves() as copies:
            model = Columns(from_column).to(device or "cpu")
            offloaded = offload(model, CONFIG, ADAM)
            columns = {
                f"tables.{number}": lambda batch, column=from_column + number: batch[:, column]
                for number in range(4)
            }
            pipeline = PrefetchPipeline(model, None, device or "cpu", depth=2, window=3, inputs=columns)
            source = iter([ints(6, 4 + from_column, seed=step) for step in range(STEPS)])
            results.append([pipeline.progress(source).detach().cpu() for _ in range(STEPS)])
            pipeline.close()
            offloaded.close()
    same(*results)
    whole = [shape for where, shape, _ in copies if where == "cuda" and shape == (6, 4 + from_column)]
    assert len(whole) == (STEPS if from_column else 0)


@pytest.mark.parametrize(
    ("leaf", "parts", "stays"),
    [
        ("x", ["x"], True),
        ("x", ["x.view(-1)"], True),
        ("x", ["x.t()"], True),
        ("x", ["x[:, 0]", "x[:, 1]", "x[:, 2:]"], True),
        ("x", ["x[:, :3]", "x[:, 1:4]"], False),
        ("x", ["x[:, :3]", "x[:, 2:]"], True),
        ("x[1:]", ["x"], True),
        ("x[1:]", ["x[:1]"], False),
        ("x[:, ::2]", ["x[:, 0]", "x[:, 2]", "x[:, 4]"], True),
        ("x", ["x.clone()"], False),
        ("x", ["x.view(torch.int32)"], False),
        ("x", ["x[:0]", "x"], True),
        ("x[:0]", ["x[:0]"], False),
        ("x[0, 0]", ["x[0]"], True),
        ("x", [], False),
    ],
)
def test_what_is_looked_up_altogether(leaf: str, parts: list[str], stays: bool) -> None:
    x = torch.arange(30).view(6, 5)
    names = {"x": x, "torch": torch}
    ids = HostIds([eval(part, names) for part in parts])
    assert ids.are_all_of(eval(leaf, names)) is stays


def test_tensors_without_plain_memory_are_no_ids() -> None:
    ids = HostIds([torch.arange(4)])
    sparse = torch.eye(3, dtype=torch.int64).to_sparse()
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    for leaf in (sparse, nested, torch.arange(4, device="meta")):
        assert not ids.are_all_of(leaf)
        assert not HostIds([leaf.clone()]).are_all_of(leaf)
