"""Index arrays of planned lookups go to the fake GPU once (random_work.py mixes them with all operations)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_device import FakeDevice, fake_device
from tests.cuda.random_work import RandomWork
from tierstore import _core as core
from tierstore.cuda.driver import Driver
from tierstore.cuda.streams import Stream
from tierstore.modules import TieredEmbeddingBag


def copies_of_a_step(device: FakeDevice, work: RandomWork, *, staged: bool) -> int:
    args, bags, _, size, csr, *_ = work._new_batch()
    more = bags.arrays
    step = core.OptimizerStep(kind=1, lr=0.1, eps=1e-8)
    update = core.UpdateArgs(
        dim=8, slots=args.slots, csr_start=csr[0], csr_positions=csr[1], step=step
    )  # fmt: skip
    out, grad = (device.share(np.zeros(size, np.float32)) for _ in range(2))
    argmax = device.share(np.zeros((len(bags.offsets) - 1, 8), np.int32))
    kept = device.stage(args.slots, args.inverse, csr, more) if staged else None
    before = fake_gpu().counts["copies"]
    work.rows.lookup_pooled(args, bags, out, 0, argmax)
    work.rows.update_pooled(update, bags, grad, 0, argmax)
    device.synchronize()
    del kept
    return fake_gpu().counts["copies"] - before


def test_planned_lookups_are_copied_to_the_gpu_once() -> None:
    with fake_device() as device:
        work = RandomWork(device, 8, 1, seed=3)
        work.do(10)
        assert copies_of_a_step(device, work, staged=True) == 0
        assert copies_of_a_step(device, work, staged=False) == 2
        del work


class CountedCalls:
    """A driver's library whose calls are counted by their names."""

    def __init__(self, library: object) -> None:
        self._library = library
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._library, name)


@contextmanager
def counted(driver: Driver) -> Iterator[Counter[str]]:
    library = driver._library
    calls = CountedCalls(library)
    driver._library = calls  # type: ignore[assignment]
    try:
        yield calls.counts
    finally:
        driver._library = library


IN_CONTEXT = {"cuCtxPushCurrent_v2": 1, "cuThreadExchangeStreamCaptureMode": 2, "cuCtxPopCurrent_v2": 1}
"""What a thread calls to begin and to end calls of a context."""
LAST = {"cuEventQuery": 1, "cuEventRecord": 1, **IN_CONTEXT}
"""What an operation ends with: it asks for the one before it, whose event it may use."""


def test_a_planned_lookup_takes_few_calls_of_the_driver() -> None:
    """No memory and no event is made, and the driver is asked for the last operation of the stream alone."""
    with fake_device() as device:
        work = RandomWork(device, 8, 1, seed=3)
        work.do(10)
        step = core.OptimizerStep(kind=1, lr=0.1, eps=1e-8)
        batches = []
        for _ in range(10):
            args, bags, _, size, csr, *_ = work._new_batch()
            update = core.UpdateArgs(
                dim=8, slots=args.slots, csr_start=csr[0], csr_positions=csr[1], step=step
            )
            out, grad = (device.share(np.zeros(size, np.float32)) for _ in range(2))
            argmax = device.share(np.zeros((len(bags.offsets) - 1, 8), np.int32))
            batches.append((args, bags, csr, update, out, grad, argmax))
        for block in [device.parts.indices.take(1) for _ in range(4)]:  # as there are if a GPU falls behind
            device.parts.indices.give(block)
        ahead: deque[Any] = deque()
        for number, (args, bags, csr, update, out, grad, argmax) in enumerate(batches):
            with counted(device.streams.driver) as staging:
                ahead.append(device.stage(args.slots, args.inverse, csr, bags.arrays))
            if len(ahead) == 2:
                ahead.popleft()  # that of the batch before
            with counted(device.streams.driver) as looking_up:
                work.rows.lookup_pooled(args, bags, out, 0, argmax)
            with counted(device.streams.driver) as updating:
                work.rows.update_pooled(update, bags, grad, 0, argmax)
            if number >= 5:
                assert staging == {"cuMemcpyAsync": 1, **LAST}
                assert looking_up == {"cuLaunchKernel": 1, "cuStreamWaitEvent": 1, **LAST}
                assert updating == {"cuLaunchKernel": 2, **LAST}
        del ahead, work


def test_a_block_that_is_done_is_taken_before_one_that_is_not() -> None:
    with fake_device("lazy") as device:
        blocks, streams = device.parts.indices, device.streams
        late, done, other = (blocks.take(100) for _ in range(3))
        for block, stream in ((late, Stream.UP), (done, Stream.DOWN), (other, Stream.DOWN)):
            with streams.operation(stream) as operation:
                operation.copy(block.device, block.address, 100)
                block.mark = operation.mark
            blocks.give(block)
        before = blocks.nbytes
        streams.synchronize(done.mark)
        with counted(streams.driver) as calls:
            assert blocks.take(100) is done
        assert not calls
        fake_gpu().run(device.stream(Stream.DOWN))
        assert blocks.take(100) is other
        assert blocks.nbytes == before
        assert blocks.take(100) is not late
        device.synchronize()
        assert blocks.take(100) is late


def shared_offsets(count: int) -> np.ndarray:
    """Offsets of bags with one id each, as a module makes them."""
    with TieredEmbeddingBag(9, 8) as module:
        (part,) = module.make_lookup(torch.zeros(count, 1, dtype=torch.int64)).parts
        return part.bags.offsets  # type: ignore[attr-defined]


def test_offsets_that_batches_share_are_copied_once() -> None:
    with fake_device() as device:
        work = RandomWork(device, 8, 1, seed=3)
        work.do(10)
        rows, found = work.rows, np.zeros((3, 8), np.float32)
        out = device.share(found)
        slots = np.array(sorted(work.filled)[:2], np.int32)
        for count in (3, 2, 3):
            offsets = shared_offsets(count)
            assert core.is_shared(offsets)
            inverse = np.array([1, 0, 1][:count], np.int32)
            bags = core.Bags(
                offsets=offsets, bag_start=np.array([0, count]), out_offset=np.zeros(1, np.int64),
                out_stride=np.full(1, 8), modes=np.zeros(1, np.uint8),
            )  # fmt: skip
            staged = device.stage(slots, inverse, core.build_csr(inverse, 2), (offsets, bags.bag_start))
            assert staged.has(offsets, bags.bag_start)
            args = core.LookupArgs(dim=8, slots=slots, inverse=inverse)
            rows.lookup_pooled(args, bags, out)
            expected = np.zeros((3, 8), np.float32)
            work.host.lookup_pooled(args, bags, expected.ctypes.data)
            device.synchronize()
            np.testing.assert_array_equal(found[:count], expected[:count])
        assert len(device.parts.staged.constants) == 1
        assert not core.is_shared(bags.bag_start)
        del work, rows, staged
