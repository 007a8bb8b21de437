"""Lookups that a fake GPU deduplicates: those of the host, in every order of streams, whatever it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.cuda.check_lookups import check_made, random_segments
from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_device import fake_device
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_hooks_on_gpu import trained as hooked_module
from tests.cuda.test_modules_on_gpu import same
from tests.cuda.test_modules_on_gpu import trained as used_module
from tests.cuda.test_training_on_fake_gpu import CONFIGS, dim_of, trained
from tests.density import thinned
from tierstore import InputError, TierConfig, TieredEmbeddingBag, optim
from tierstore import _core as core
from tierstore.cuda import lookups
from tierstore.cuda.driver import OUT_OF_MEMORY
from tierstore.cuda.lookups import GpuBatch, LookupMaker


@pytest.fixture(autouse=True)
def made_from_one_id() -> Iterator[None]:
    with mock.patch.object(lookups, "MAKES_FROM", 1):
        yield


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_lookups_are_those_of_the_host(seed: int, order: str) -> None:
    rng = np.random.default_rng(seed)
    with fake_device(order, seed) as device:
        for _ in range(4):
            batch = check_made(device, random_segments(rng, 300))
            assert isinstance(batch, GpuBatch)
            del batch


def test_lookups_beyond_a_limit_leave_the_gpu() -> None:
    """Those beyond the limit are the host's arrays; blocks of those that are gone are used again."""
    rng = np.random.default_rng(5)
    with fake_device() as device, mock.patch.object(lookups, "MOST_BYTES", 2 << 16):
        kept = [check_made(device, random_segments(rng, 300), bring=False) for _ in range(4)]
        assert [batch._made is None for batch in kept] == [False, False, True, True]  # type: ignore[union-attr]
        blocks = device.parts.indices.nbytes
        del kept
        for _ in range(5):
            batch = check_made(device, random_segments(rng, 300), bring=False)
            assert batch._made is not None  # type: ignore[union-attr]
        assert device.parts.indices.nbytes == blocks
        del batch


@pytest.mark.parametrize("after", [0, 1], ids=["lookup", "scratch"])
def test_the_host_makes_what_the_gpu_has_no_room_for(after: int) -> None:
    segments = random_segments(np.random.default_rng(6), 300)
    with fake_device() as device:
        fake_gpu().fail("cuMemAlloc", OUT_OF_MEMORY, after)
        assert not isinstance(check_made(device, segments), GpuBatch)
        assert isinstance(check_made(device, segments), GpuBatch)


def test_the_host_makes_what_the_gpu_cannot_sort() -> None:
    with fake_device() as device:
        for ids, bound, padding in (
            (np.arange(100), 1 << 32, -1),  # keys of more than 32 bits
            (np.full(100, 7), 10, 7),  # no position has a row
            (np.arange(0), 10, -1),
        ):
            assert not isinstance(check_made(device, [(ids, 0, bound, padding)]), GpuBatch)
        assert isinstance(check_made(device, [(np.arange(100), 0, (1 << 32) - 1, -1)]), GpuBatch)


@pytest.mark.parametrize("count", [99, 100, 101])
def test_few_ids_stay_with_the_host(count: int) -> None:
    ids = np.arange(count) % 40
    with fake_device() as device, mock.patch.object(lookups, "MAKES_FROM", 100):
        assert device.makes_from == 100
        assert isinstance(check_made(device, [(ids, 0, 40, -1)]), GpuBatch) == (count >= 100)


def test_a_bad_id_is_that_of_the_host() -> None:
    ids = np.arange(100)
    with fake_device() as device:
        for wrong in ({0: 100}, {99: -1}, {30: 1 << 40, 31: -1}):
            bad = ids.copy()
            bad[list(wrong)] = list(wrong.values())
            check_made(device, [(ids, 0, 100, -1), (bad, 1, 100, -1), (bad, 2, 100, -1)])


ON_HOST: dict[tuple[str, bool], tuple[list[torch.Tensor], list[int]]] = {}


MADE = itertools.product(["uvm and ssd", "lookahead", "hbm alone", "cut rows"], [False, True], ORDERS)


@pytest.mark.parametrize(("config", "prefetch", "order"), thinned(MADE, 3))
def test_training_is_that_of_the_host(config: str, prefetch: bool, order: str) -> None:
    dim = dim_of(config)
    if (config, prefetch) not in ON_HOST:
        ON_HOST[config, prefetch] = trained(prefetch, CONFIGS[config], dim)
    with fake_torch(order, seed=7), mock.patch.object(LookupMaker, "_sorted", made := Counted()):
        outputs, counts = trained(prefetch, replace(CONFIGS[config], device="cuda:0"), dim)
    expected, expected_counts = ON_HOST[config, prefetch]
    assert made.count >= 20
    assert counts == expected_counts
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy().view(np.uint32), theirs.numpy().view(np.uint32))


class Counted:
    """``LookupMaker._sorted``, whose calls are counted."""

    def __init__(self) -> None:
        self.count, self._plain = 0, LookupMaker._sorted

    def __get__(self, maker: LookupMaker, _: type) -> object:
        self.count += 1
        return self._plain.__get__(maker)


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("name", ["rows with padding", "max", "weighted", "sequences", "rows of bf16"])
def test_a_module_has_the_bits_of_the_host(name: str, order: str) -> None:
    """Weights with gradients, accumulated gradients, frozen tables, commits: the host needs some arrays."""
    with fake_torch(order, seed=5):
        found = used_module(name, "cuda:0")
    same(found, used_module(name, None))


@pytest.mark.parametrize("name", ["rows with padding", "collection"])
def test_hooks_have_the_bits_of_the_host(name: str) -> None:
    with fake_torch("random", seed=5):
        found = hooked_module(name, "cuda:0")
    same(found, hooked_module(name, None))


def test_a_bad_id_of_a_module_is_named() -> None:
    def error(device: str | None) -> str:
        config = TierConfig(hbm="8KiB", device=device)
        with TieredEmbeddingBag(400, 8, mode="sum", config=config, optimizer=optim.SGD(lr=0.1)) as table:
            ids = torch.arange(24).view(8, 3)
            ids[5, 1] = 400
            with pytest.raises(InputError) as raised:
                table(ids)
            return str(raised.value)

    expected = error(None)
    with fake_torch("lazy"):
        assert error("cuda:0") == expected


def test_batches_of_the_core_need_no_device() -> None:
    ids = np.array([3, 3, 1])
    batch, *_ = core.make_batch([(ids.ctypes.data, 3, False, 0, 9, -1)])
    assert batch.is_whole
    batch.bring()
    np.testing.assert_array_equal(batch.device_inverse, batch.inverse)
    assert not core.Batch(batch.unique).is_whole
