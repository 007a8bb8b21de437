"""Batches in pages of their own equal those that the loader has made."""

from __future__ import annotations

import os
from collections import deque
from itertools import islice

import torch
from torch.utils import _pytree as pytree

from tierstore import data
from tierstore.data.dataset import ones
from tierstore.data.own_pages import LEAST_BYTES, OwnPagesWhileKept, in_own_pages


def test_every_dataset_batch_is_copied_whole() -> None:
    batch = next(iter(data.load("synthetic:zipf:0.8").train(4096)))
    copied = in_own_pages(batch)
    before, after = pytree.tree_leaves(batch), pytree.tree_leaves(copied)
    assert len(before) == len(after)
    moved = 0
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old, new)
            assert old.dtype == new.dtype
            large = old.nbytes >= LEAST_BYTES
            assert (old.data_ptr() != new.data_ptr()) == large
            moved += large
    assert moved >= 3  # dense features, ids, offsets
    assert copied.sparse.keys() == batch.sparse.keys()
    assert torch.equal(copied.sparse.offsets(), batch.sparse.offsets())


def test_small_and_strange_leaves_stay() -> None:
    least = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    shared = torch.zeros(LEAST_BYTES, dtype=torch.uint8).share_memory_()
    learned = torch.zeros(LEAST_BYTES, requires_grad=True)
    sparse = torch.eye(200).to_sparse()
    parameter = torch.nn.Parameter(torch.zeros(LEAST_BYTES), requires_grad=False)
    quantized = torch.quantize_per_tensor(torch.zeros(LEAST_BYTES), 0.1, 0, torch.quint8)
    batch = {"small": least[1:], "shared": shared, "learned": learned, "sparse": sparse, "none": None, "n": 3}
    batch |= {"parameter": parameter, "quantized": quantized}
    batch["nested"] = torch.nested.nested_tensor([torch.zeros(LEAST_BYTES), torch.zeros(3)])
    copied = in_own_pages(batch)
    assert all(copied[name] is batch[name] for name in batch)
    assert in_own_pages([least])[0] is not least


def test_strides_and_shapes() -> None:
    odd = torch.arange(3 * LEAST_BYTES, dtype=torch.int32).view(3, -1).t()
    assert torch.equal(in_own_pages((odd,))[0], odd)
    spread = torch.zeros(1).expand(LEAST_BYTES)
    assert torch.equal(in_own_pages(spread), spread)
    flags = torch.ones(LEAST_BYTES, dtype=torch.bool)
    assert in_own_pages(flags).dtype == torch.bool
    halves = torch.randn(LEAST_BYTES).bfloat16()
    assert torch.equal(in_own_pages(halves), halves)


def test_a_forked_process_has_its_own_copy() -> None:
    tensor = in_own_pages(torch.zeros(LEAST_BYTES, dtype=torch.uint8))
    if not (child := os.fork()):
        tensor.numpy()[:] = 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not tensor.any()


def test_the_memory_lives_as_long_as_the_tensor() -> None:
    tensors = [in_own_pages(torch.full((LEAST_BYTES,), n)) for n in range(20)]
    views = [tensor[1:] for tensor in tensors]
    del tensors
    assert all((view == n).all() for n, view in enumerate(views))


def test_what_batches_share_is_not_copied() -> None:
    """Lengths of one id per table, also where the first batch is drawn in inference mode."""
    ones.cache_clear()
    made = data.load("synthetic:zipf:0.8").train(4096)
    with torch.inference_mode():
        first = next(made)
    given = OwnPagesWhileKept(made, few=2)
    batches = list(islice(given, 6))
    assert len({batch.sparse.lengths().data_ptr() for batch in [first, *batches]}) == 1
    assert not batches[-1].sparse.lengths().is_inference()
    assert len({batch.sparse.values().data_ptr() for batch in batches}) == 6


def test_batches_are_copied_while_many_wait() -> None:
    made = [data.load("synthetic:zipf:0.8").train(4096) for _ in range(2)]
    given = OwnPagesWhileKept(made[0], few=4)
    for batch, original in zip(islice(given, 20), islice(made[1], 20), strict=True):
        assert torch.equal(batch.dense, original.dense)
        del batch, original  # none waits, so none is copied

    loader = deque(next(made[0]) for _ in range(12))
    addresses = [batch.dense.data_ptr() for batch in loader]
    given = OwnPagesWhileKept((loader.popleft() for _ in range(12)), few=4)
    waiting = []
    for number in range(10):
        waiting.append(next(given))
        assert (waiting[-1].dense.data_ptr() != addresses[number]) == (4 <= number < 9)
        if number == 8:
            waiting.clear()
