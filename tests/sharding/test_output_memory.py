"""Memory of outputs that is used again: never while somebody has the tensor."""

from __future__ import annotations

import torch

from tierstore.sharding.comms import OutputMemory, WireMemory


def test_memory_is_used_again_when_nobody_has_the_tensor() -> None:
    memory = OutputMemory()
    first = memory.take((8, 100))
    address = first.data_ptr()
    assert (first.shape, first.dtype) == ((8, 100), torch.float32)
    second = memory.take((8, 100))
    assert second.data_ptr() != address
    del first
    assert memory.take((4, 100)).data_ptr() == address  # smaller ones fit


def test_views_and_graphs_keep_it() -> None:
    memory = OutputMemory()
    out = memory.take((8, 100))
    view, address = out[2:3], out.data_ptr()
    del out
    assert memory.take((8, 100)).data_ptr() != address
    weight = torch.ones(8, 100, requires_grad=True)
    out = memory.take((8, 100)).fill_(2)
    loss = (weight * out).sum()
    del out, view
    for _ in range(3):
        memory.take((8, 100)).fill_(7)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.eq(2).all()


def test_outputs_that_are_kept_are_forgotten_and_empty_ones_are_allowed() -> None:
    memory = OutputMemory()
    kept = [memory.take((5, 7)).fill_(number) for number in range(6)]
    assert [int(tensor[4, 6]) for tensor in kept] == list(range(6))
    assert memory.take((0, 7)).shape == (0, 7)
    assert memory.take(()).shape == ()


def resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20


def test_what_one_large_batch_took_goes_back_to_the_system() -> None:
    outputs, wire = OutputMemory(), WireMemory()
    outputs.take((1000,)), wire.take("received", 1000)
    before = resident_mib()
    outputs.take((1 << 24,)).fill_(1)
    wire.take("received", 1 << 24).fill_(1)
    assert resident_mib() - before > 100
    for _ in range(80):
        outputs.take((1000,)), wire.take("received", 1000)
    assert resident_mib() - before < 20


def test_what_is_on_its_way_stays_when_its_room_is_replaced() -> None:
    wire = WireMemory()
    small = wire.take("received", 100).fill_(3)
    assert wire.take("received", 100).data_ptr() == small.data_ptr()
    large = wire.take("received", 100_000).fill_(4)
    assert small.eq(3).all()
    assert large.shape == (100_000,)
    assert wire.take("received", 6, torch.bfloat16).dtype == torch.bfloat16
    assert wire.take("received", 0).shape == (0,)
