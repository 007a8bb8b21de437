"""Streams of torch around our modules: what reads a tensor waits for who wrote it, where torch's rules leave
that to us. Users let the current stream wait for side streams of theirs, as for torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tierstore
from tests.cuda.fake_streams import Streams, TorchStream, fake_streams
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import ADAM, CONFIG, DIM, ROWS, collection, ints, same
from tierstore import KeyedJaggedTensor, TieredEmbedding, TieredEmbeddingBag
from tierstore.modules import base, joining
from tierstore.modules.accumulation import Accumulation
from tierstore.pipeline import planned


def bag(device: str | None, mode: str = "mean") -> TieredEmbeddingBag:
    return TieredEmbeddingBag(ROWS, DIM, mode=mode, device=device, config=CONFIG, optimizer=ADAM)


# -- what the checker finds -----------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_a_stream_that_does_not_wait_is_found(ordered: bool) -> None:
    with fake_torch(), fake_streams() as streams:
        side = streams.side()
        with streams.on(side):
            made = torch.ones(8, device="cuda")
        if ordered:
            streams.current().wait_stream(side)
        made.mul_(2)
        assert bool(streams.wrong) != ordered


@pytest.mark.parametrize("knows", ["nothing", "record_stream", "a wait", "the host"])
def test_memory_that_is_freed_while_a_stream_uses_it_is_found(knows: str) -> None:
    with fake_torch(), fake_streams() as streams:
        side, made = streams.side(), torch.ones(8, device="cuda")
        side.wait_stream(streams.current())
        with streams.on(side):
            made.sum()
        if knows == "record_stream":
            made.record_stream(side)
        elif knows == "a wait":
            streams.current().wait_stream(side)
        elif knows == "the host":
            side.record_event().synchronize()
        del made
        assert bool(streams.wrong) == (knows == "nothing")


# -- ids on a GPU, which the worker of a prefetch copies -----------------------------------------------


def keyed(ids: Tensor, device: str) -> KeyedJaggedTensor:
    """Four bags of each key, by offsets: lengths are computed where the ids are."""
    offsets = torch.arange(0, 41, 5).to(device)
    return KeyedJaggedTensor(["a", "b"], ids.view(-1).to(device), offsets=offsets)


def prefetched(keys: bool, device: str | None, streams: Streams | None) -> list[Any]:
    """Outputs and rows of a training on a side stream of a GPU, whose ids are made there, too."""
    number = torch.device(device or "cuda").index or 0
    where = device or "cpu"
    ahead: list[Any] = []
    plain = base.find_ahead

    def batches() -> Iterator[Any]:
        for step in range(8):
            ids = ints(4, 10, seed=step)
            yield keyed(ids, where) if keys else ids.to(where)

    def find_ahead(*given: Any) -> Any:
        ahead.append(plain(*given))
        return ahead[-1]

    found: list[Any] = []
    with (
        streams.on(streams.side(number)) if streams else nullcontext(),
        mock.patch.object(base, "find_ahead", find_ahead),
        collection(device=device) if keys else bag(device) as module,
    ):
        for batch in tierstore.prefetch(batches(), module, depth=2, window=3):
            out = module(batch)
            out = out.values() if keys else out
            out.square().sum().backward()
            found.append(out.detach().cpu())
        found += module.state_dict().values()
    assert sum(one is not None for one in ahead) == 7  # all but the first, from which calls are learned
    return found


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("keys", [False, True])
def test_the_worker_waits_for_ids_on_any_gpu(keys: bool, number: int, order: str) -> None:
    """Also on a GPU that is not torch's current one, and before lengths are computed of offsets."""
    expected = prefetched(keys, None, None)
    with fake_torch(order, seed=2, devices=2), fake_streams(2) as streams:
        found = prefetched(keys, f"cuda:{number}", streams)
        assert streams.wrong == []
    same(found, expected)


def test_a_worker_that_does_not_wait_is_found() -> None:
    with (
        fake_torch(),
        fake_streams() as streams,
        mock.patch.object(planned, "current_streams", return_value=[]),
    ):
        prefetched(False, "cuda:0", streams)
        assert streams.wrong


# -- gradients that are kept -----------------------------------------------------------------------------


@contextmanager
def backward_on(stream: TorchStream, streams: Streams) -> Iterator[None]:
    """Let backward passes of lookups run in the stream of their forward call, as autograd does. It waits for
    the caller's stream, but the caller's only for gradients of tensors that are leaves."""
    plain = Accumulation.keep

    def keep(self: Accumulation, module: Any, lookup: Any, gradients: Any) -> None:
        stream.wait_stream(streams.current())
        for grad in getattr(gradients, "grads", None) or [gradients.grad]:
            grad.record_stream(stream)
        with streams.on(stream):
            plain(self, module, lookup, gradients)

    with mock.patch.object(Accumulation, "keep", keep):
        yield


def accumulated(kind: str, streams: Streams | None) -> list[Any]:
    """Rows and norms of a training whose lookups are made on a side stream."""
    device = "cuda:0" if streams else None
    side = streams.side() if streams else None
    module: Any = (
        TieredEmbedding(ROWS, DIM, device=device, config=CONFIG, optimizer=ADAM)
        if kind == "rows"
        else bag(device, "sum" if kind == "weighted" else kind)
    )

    def looked_up(step: int) -> Tensor:
        ids, more = ints(4, 10, seed=step), {}
        if kind == "weighted":
            more["per_sample_weights"] = torch.full(ids.shape, 0.5)
        return module(ids, **more)

    found: list[Any] = []
    with module:
        for step in range(4):
            with tierstore.accumulate(module) as rows:
                for part in range(3):
                    if streams is None or side is None:
                        looked_up(3 * step + part).square().sum().backward()
                        continue
                    side.wait_stream(streams.current())
                    with streams.on(side):
                        out = looked_up(3 * step + part)
                    streams.current().wait_stream(side)
                    out.record_stream(streams.current())  # type: ignore[arg-type]
                    with backward_on(side, streams):
                        out.square().sum().backward()
                if step % 2:
                    found.append(torch.nn.utils.clip_grad_norm_(rows.parameters(), 0.5).cpu())
        return [*found, module.rows(torch.arange(ROWS))]


KINDS = ["mean", "max", "weighted", "rows"]


@pytest.mark.parametrize("kind", KINDS)
def test_kept_gradients_may_come_from_another_stream(kind: str) -> None:
    expected = accumulated(kind, None)
    with fake_torch("random", seed=4), fake_streams() as streams:
        found = accumulated(kind, streams)
        assert streams.wrong == []
    same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_kept_gradients_that_are_not_waited_for_are_found(kind: str) -> None:
    def forgets(tensors: list[Tensor]) -> Any:  # a mock would keep them
        return lambda: None

    with (
        fake_torch("random", seed=4),
        fake_streams() as streams,
        mock.patch.object(joining, "made_here", forgets),
    ):
        accumulated(kind, streams)
        assert len({*streams.wrong}) == 2  # nobody waits, and the allocator is not told
