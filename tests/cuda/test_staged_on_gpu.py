"""Index arrays of planned lookups go to the fake GPU once (random_work.py mixes them with all operations)."""

from __future__ import annotations

import numpy as np
import torch

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_device import FakeDevice, fake_device
from tests.cuda.random_work import RandomWork
from tierstore import _core as core
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
