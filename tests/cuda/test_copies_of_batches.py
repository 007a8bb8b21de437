"""PrefetchPipeline copies batches to a GPU on a stream of its own: what uses a copy waits for it, and torch's
allocator knows. tests/cuda/fake_streams.py finds each wait and each record that is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch as TorchrecBatch

from tests.cuda.fake_streams import Streams, TorchStream, fake_streams
from tests.cuda.fake_torch import FakeCuda, GpuTensor, fake_torch
from tests.cuda.test_modules_on_gpu import collection, keyed, same
from tierstore import PrefetchPipeline
from tierstore.data.dataset import Batch
from tierstore.modules import base
from tierstore.pipeline import copies
from tierstore.torchrec.pipelines import TrainPipelineSparseDist

STEPS = 8


class Pair(NamedTuple):
    sparse: Any
    dense: Tensor


@dataclass(frozen=True)
class Shown:
    """Shows its tensors, and has no ``record_stream``."""

    sparse: Any
    dense: Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        moved = (part.to(device, non_blocking=non_blocking) for part in (self.sparse, self.dense))
        return type(self)(*moved)


class Hidden:
    """Shows nothing."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    sparse = property(lambda self: self.parts[0])
    dense = property(lambda self: self.parts[1])

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return Hidden(self.parts[0], self.parts[1].to(device, non_blocking=non_blocking))


class Computes(Shown):
    """Computes where its tensor is."""

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return Shown(self.sparse, self.dense.to(device, non_blocking=non_blocking) * 2)


KINDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "tuple": Pair,
    "ours": lambda sparse, dense: Batch(dense, sparse, dense[:, 0]),
    "torchrec's": lambda sparse, dense: TorchrecBatch(dense, sparse, dense[:, 0]),
    "shown": Shown,
    "hidden": Hidden,
    "computes": Computes,
}


class Model(nn.Module):
    def __init__(self, device: str | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = collection(device=device)
        self.top = nn.Linear(3, 1).to(device or "cpu")

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        sparse = getattr(batch, "sparse", None) or batch.sparse_features
        dense = batch.dense if hasattr(batch, "dense") else batch.dense_features
        assert sparse.values().is_cpu
        out = self.top(dense).sum() + self.bags(sparse).values().square().sum()
        return out, out


def batches(kind: str, device: str | None) -> Iterator[Any]:
    """Made on the GPU where it computes, so that its stream must be waited for."""
    for step in range(STEPS):
        dense = torch.full((4, 3), float(step), device=device if kind == "computes" else None)
        yield KINDS[kind](keyed(step), dense)


def pipeline_of(model: Model, device: str | None, **more: Any) -> PrefetchPipeline:
    more = {"depth": 2, "window": 3, "inputs": {"bags": lambda batch: batch.sparse}, **more}
    return PrefetchPipeline(model, torch.optim.SGD(model.top.parameters(), 1e-3), device or "cpu", **more)


def trained(kind: str, device: str | None, streams: Streams | None = None, **more: Any) -> list[Any]:
    """Losses, rows and dense weights; each step is in a current stream of its own."""
    model = Model(device)
    if kind == "torchrec's":
        more["inputs"] = None
    pipeline, source = pipeline_of(model, device, **more), batches(kind, device)
    number = torch.device(device or "cuda").index or 0
    found = []
    with suppress(StopIteration):
        while True:
            side = streams.side(number) if streams else None
            if streams and side:
                side.wait_stream(streams.current(number))
            with streams.on(side) if streams and side else nullcontext():
                found.append(pipeline.progress(source).detach())
            if streams and side:
                streams.current(number).wait_stream(side)
                found[-1].record_stream(streams.current(number))
            found[-1] = found[-1].cpu()
    assert len(found) == STEPS
    found += [value.detach().cpu() for value in model.state_dict().values()]
    pipeline.close()
    model.bags.close()
    return found


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_copied_in_order(kind: str, number: int) -> None:
    """To any GPU, and with a current stream of the user's."""
    expected = trained(kind, None)
    with fake_torch("random", seed=3, devices=2), fake_streams(2) as streams:
        found = trained(kind, f"cuda:{number}", streams)
        assert streams.wrong == []
    same(found, expected)


# -- what the checker must find ------------------------------------------------------------------


def found_wrong(kind: str, left_out: Any) -> list[str]:
    with fake_torch("random", seed=3), fake_streams() as streams, left_out:
        trained(kind, "cuda:0", streams)
        return sorted({*streams.wrong})


FOLLOWED = [kind for kind in KINDS if kind != "hidden"]
UNORDERED = "a stream of cuda:0 does not wait for another one"
FREED = "memory is freed while a stream uses it that was not recorded"


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_copy_that_is_not_waited_for_is_found(kind: str) -> None:
    assert UNORDERED in found_wrong(kind, mock.patch.object(TorchStream, "wait_event"))


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_copy_that_the_allocator_does_not_know_is_found(kind: str) -> None:
    def forgets(made: Any, stream: Any) -> None:  # a mock would keep the copy
        pass

    assert FREED in found_wrong(kind, mock.patch.object(copies, "_record", forgets))


def test_a_copy_that_does_not_wait_for_its_source_is_found() -> None:
    plain = TorchStream.wait_stream

    def waits(stream: TorchStream, other: TorchStream) -> None:
        if stream not in copying:
            plain(stream, other)

    with fake_torch("random", seed=3), fake_streams() as streams:
        copying = [streams.side()]
        with (
            mock.patch.object(torch.cuda, "Stream", return_value=copying[0]),
            mock.patch.object(TorchStream, "wait_stream", waits),
        ):
            trained("computes", "cuda:0", streams)
        assert {*streams.wrong} == {UNORDERED}


@pytest.mark.parametrize("known", [True, False])
def test_a_source_of_a_batch_that_is_dropped_is_known_to_the_allocator(known: bool) -> None:
    """Nothing waits for the copy any more."""
    with fake_torch("random", seed=3), fake_streams() as streams:
        copy = copies.GpuCopies(torch.device("cuda", 0))
        batch = Computes(keyed(1), torch.ones(4, 3, device="cuda:0"))
        with nullcontext() if known else mock.patch.object(GpuTensor, "record_stream"):
            copy.start(batch)
        copy.forget()
        del batch
        assert streams.wrong == ([] if known else [FREED])


# -- when it copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tuple", "torchrec's"])
def test_the_next_batch_is_copied_while_one_is_in_use(kind: str) -> None:
    """Before its forward call, without waiting for memory; its lookups are those that were made ahead."""
    began: list[int] = []
    ahead: list[bool] = []
    options: list[dict[str, Any]] = []
    start, to, find = copies.GpuCopies.start, FakeCuda._to, base.find_ahead
    forward = Model.forward

    def starts(self: copies.GpuCopies, batch: Any, *ids: Any) -> None:
        start(self, batch, *ids)
        began.append(len(ahead))

    def moves(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.shape == (4, 3):
            options.append(kwargs)
        return to(func, tensor, *args, **kwargs)

    def calls(self: Model, batch: Any) -> Any:
        ahead.append(False)
        return forward(self, batch)

    def finds(*given: Any) -> Any:
        lookup = find(*given)
        ahead[-1] = lookup is not None
        return lookup

    with (
        fake_torch("random", seed=3),
        mock.patch.object(copies.GpuCopies, "start", starts),
        mock.patch.object(FakeCuda, "_to", staticmethod(moves)),
        mock.patch.object(Model, "forward", calls),
        mock.patch.object(base, "find_ahead", finds),
    ):
        trained(kind, "cuda:0")
    first = int(kind == "torchrec's")  # it shows the calls
    assert began[:3] == [first, first + 1, first + 2]
    assert ahead == [not first, *[True] * (STEPS - 1)]
    assert len(options) == STEPS  # each once
    assert all(given.get("non_blocking") for given in options)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_pass_may_end_before_a_copy_is_used(depth: int) -> None:
    results = []
    for device in (None, "cuda:0"):
        with (
            fake_torch("random", seed=3) if device else nullcontext(),
            fake_streams() if device else nullcontext(Streams(1)) as streams,
        ):
            model = Model(device)
            pipeline = pipeline_of(model, device, depth=depth, window=2 * depth)
            found = []
            for _ in range(2):
                source = batches("tuple", device)
                found += [pipeline.progress(source).detach().cpu() for _ in range(4)]
            pipeline.close()
            model.eval()
            found.append(pipeline.progress(batches("tuple", device)).cpu())
            pipeline.close()
            model.bags.close()
            assert streams.wrong == []
        results.append(found)
    same(*results)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_copy_that_fails_is_the_error_of_its_batch(fails: int) -> None:
    """So often; a copy ahead that fails is tried again."""
    left = [fails]

    class Failing(Shown):
        def to(self, device: Any, non_blocking: bool = False) -> Any:
            if self.dense[0, 0] == 5 and left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("no room")
            return super().to(device, non_blocking)

    with fake_torch("random", seed=3), mock.patch.dict(KINDS, {"failing": Failing}):
        model = Model("cuda:0")
        pipeline, source = pipeline_of(model, "cuda:0"), batches("failing", "cuda:0")
        for _ in range(5):
            pipeline.progress(source)
        with pytest.raises(torch.OutOfMemoryError) if fails == 2 else nullcontext():
            pipeline.progress(source)
        assert left == [0]
        pipeline.close()
        model.bags.close()


def test_torchrecs_pipeline_leaves_its_last_batches_out() -> None:
    with fake_torch():
        model = Model("cuda:0")
        device, optimizer = torch.device("cuda", 0), torch.optim.SGD(model.top.parameters(), 1e-3)
        pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=False)
        source, steps = batches("torchrec's", "cuda:0"), 0
        with suppress(StopIteration):
            while True:
                pipeline.progress(source)
                steps += 1
        assert steps == STEPS - 2
        model.bags.close()
