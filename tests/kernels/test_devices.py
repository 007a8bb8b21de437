"""What every device promises, and that tiers and training ask a device for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import tierstore
from tests.cuda.fake import ORDERS
from tests.cuda.fake_device import FakeDevice, fake_device
from tests.kernels.far_device import FarDevice
from tierstore import TierConfig, TieredEmbeddingBag, optim
from tierstore import _core as core
from tierstore.cache.device import HOST, OPENERS, Device, DeviceRows, HostDevice, open_device
from tierstore.cache.tiers import registry
from tierstore.cache.tiers.memory import MemoryTier, TierPlan
from tierstore.cache.tiers.protocol import Tier
from tierstore.cache.tiers.registry import TierRequest
from tierstore.errors import ConfigError

SLOTS, ROW, DIM = 64, 144, 32  # weights that a GPU keeps apart, 1 float of state, padding
DEVICES = {"host": HostDevice, "far": FarDevice}


@pytest.fixture(params=[*sorted(DEVICES), *ORDERS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each device; a GPU on the fake driver in every order."""
    if request.param in DEVICES:
        yield DEVICES[request.param]()
    else:
        with fake_device(request.param, seed=3) as gpu:
            yield gpu


def address(device: Device, array: np.ndarray) -> int:
    """The address at which the device finds a tensor, which the array stands for."""
    return device.share(array) if isinstance(device, FakeDevice) else array.ctypes.data


def finish(device: Device) -> None:
    """Wait for what kernels write to tensors."""
    if isinstance(device, FakeDevice):
        device.synchronize()


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def some_rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, ROW // 4)).astype(np.float32).view(np.uint8)


def read(rows: DeviceRows, at: np.ndarray) -> np.ndarray:
    out = np.zeros((len(at), ROW), np.uint8)
    rows.copy_out(at, out)
    return out


def filled(device: Device, count: int = 16) -> tuple[DeviceRows, np.ndarray]:
    rows, data = device.allocate(SLOTS, ROW, dim=DIM), some_rows(count)
    rows.commit(count)
    rows.copy_in(np.arange(count, dtype=np.int32), data)
    return rows, data


def values() -> core.InitialValues:
    one = np.array([1], np.float32)
    return core.InitialValues(
        dim=DIM, state_floats=1, state_value=0.5, kinds=np.array([2], np.uint8), first=-one, second=one,
        seeds=np.array([9], np.uint64),
    )  # fmt: skip


def test_rows_come_back_from_their_slots(device: Device) -> None:
    rows, data = filled(device)
    assert rows.row_bytes == ROW
    np.testing.assert_array_equal(read(rows, slots(7, 0, 15)), data[[7, 0, 15]])
    rows.copy_in(slots(3, 5), data, slots(9, 9))
    np.testing.assert_array_equal(read(rows, slots(3, 5, 4)), data[[9, 9, 4]])
    rows.copy_in(slots(), data)
    assert read(rows, slots()).shape == (0, ROW)


def test_more_memory_leaves_rows_where_they_are(device: Device) -> None:
    rows, data = filled(device)
    for committed in (17, 4, SLOTS):
        rows.commit(committed)
        np.testing.assert_array_equal(read(rows, np.arange(16, dtype=np.int32)), data)
    rows.copy_in(slots(SLOTS - 1), data[:1])
    np.testing.assert_array_equal(read(rows, slots(SLOTS - 1, 1)), data[[0, 1]])
    with pytest.raises(ValueError, match="not so many slots"):
        rows.commit(SLOTS + 1)


def test_discarded_slots_may_be_written_again(device: Device) -> None:
    rows, data = filled(device)
    rows.discard(10)
    np.testing.assert_array_equal(read(rows, np.arange(10, dtype=np.int32)), data[:10])
    rows.copy_in(slots(12), data[2:3])
    np.testing.assert_array_equal(read(rows, slots(12, 9)), data[[2, 9]])


def test_rows_move(device: Device) -> None:
    rows, data = filled(device)
    rows.commit(SLOTS)
    rows.move(slots(3, 1), slots(40, 9))
    np.testing.assert_array_equal(read(rows, slots(40, 9, 2)), data[[3, 1, 2]])


def test_rows_are_copied_from_other_rows(device: Device) -> None:
    (rows, data), (others, more) = filled(device), filled(device, 9)
    assert device.takes(others)
    rows.copy_rows(slots(12, 3, 0), others, slots(2, 8, 0))
    np.testing.assert_array_equal(read(rows, slots(12, 3, 0, 4)), [*more[[2, 8, 0]], data[4]])
    np.testing.assert_array_equal(read(others, slots(2, 8, 0)), more[[2, 8, 0]])
    rows.copy_rows(slots(), others, slots())
    with pytest.raises(ValueError, match="differ"):
        rows.copy_rows(slots(1, 2), others, slots(1))
    longer = device.allocate(4, 2 * ROW)
    longer.commit(4)
    with pytest.raises(ValueError, match=r"not as long|rows do"):
        rows.copy_rows(slots(1), longer, slots(1))
    np.testing.assert_array_equal(read(rows, slots(1)), data[[1]])


def test_a_device_has_a_name_and_memory(device: Device) -> None:
    assert torch.device(device.name).type in ("cpu", "cuda")
    free, most = device.memory()
    assert 0 < free <= most


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_rows_of_uvm_come_and_go(device: Device, kind: str) -> None:
    """To where lookups take them, and back, with what the host reads and writes beside."""
    (rows, data), place = filled(device), device.uvm(kind)
    uvm, staging = place.allocate(SLOTS, ROW, dim=DIM), place.staging(SLOTS, ROW)
    uvm.commit(16)
    assert place.takes(rows)
    uvm.copy_rows(slots(4, 15, 0), rows, slots(1, 2, 3))
    np.testing.assert_array_equal(read(uvm, slots(0, 4, 15)), data[[3, 1, 2]])
    uvm.copy_in(slots(4), data, slots(9))
    if staging is not None:
        staging.commit(2)
        staging.copy_rows(slots(0, 1), uvm, slots(4, 15))
        uvm.copy_in(slots(4), data, slots(0))
        rows.copy_rows(slots(12, 13), staging, slots(0, 1))
        np.testing.assert_array_equal(read(rows, slots(12, 13)), data[[9, 2]])
    place.close()


def test_initial_rows_are_those_of_the_host(device: Device) -> None:
    rows, _ = filled(device)
    keys, expected = np.array([5, 1 << 40, 7], np.uint64), np.zeros((3, ROW), np.uint8)
    core.HostRows.view(expected).initialise(values(), None, keys)
    rows.initialise(values(), slots(8, 2, 11), keys)
    np.testing.assert_array_equal(read(rows, slots(8, 2, 11)), expected)
    rows.initialise(values(), None, keys)
    np.testing.assert_array_equal(read(rows, slots(0, 1, 2)), expected)


def test_rows_are_encoded_and_decoded_where_they_are(device: Device) -> None:
    rows, data = filled(device)
    codec = core.RowCodec(weights="bf16", state="fp32", dim=DIM, state_floats=4)
    keys, encoded = np.array([5, 6, 7], np.uint64), np.zeros((3, codec.row_bytes), np.uint8)
    assert rows.encode(codec, keys, encoded, slots(7, 0, 15)) == -1
    expected = np.zeros_like(encoded)
    core.HostRows.view(data[[7, 0, 15]]).encode(codec, keys, expected)
    np.testing.assert_array_equal(encoded, expected)
    near = np.zeros((3, ROW), np.uint8)
    core.HostRows.view(near).decode(codec, encoded)
    rows.decode(codec, encoded, slots(9, 2, 11))
    np.testing.assert_array_equal(read(rows, slots(9, 2, 11)), near)
    rows.decode(codec, encoded, slots(1, 2), slots(2, 0))
    np.testing.assert_array_equal(read(rows, slots(1, 2, 11)), near[[2, 0, 2]])


def test_loaded_rows_are_the_arrays(device: Device) -> None:
    data = some_rows(5)
    np.testing.assert_array_equal(read(device.load(data), slots(4, 0)), data[[4, 0]])
    device.load(data[:0])


def step_of(kind: int) -> core.OptimizerStep:
    return core.OptimizerStep(kind=kind, lr=0.1, eps=1e-8)


def batch() -> tuple[np.ndarray, np.ndarray, core.Bags]:
    inverse = slots(0, 1, 2, 0, -1, 2, 2, 1)
    bags = core.Bags(
        offsets=np.array([0, 3, 4, 8]), bag_start=np.array([0, 2, 3]), out_offset=np.array([0, 2 * DIM]),
        out_stride=np.array([DIM, DIM]), modes=np.array([0, 2], np.uint8),
    )  # fmt: skip
    return slots(11, 3, 8), inverse, bags


def trained(device: Device, rows: DeviceRows, *, finite: bool = True) -> list[np.ndarray]:
    """All that the kernels give for one batch, and the rows afterwards."""
    at, inverse, bags = batch()
    args = core.LookupArgs(dim=DIM, slots=at, inverse=inverse)
    out, argmax = np.zeros((3, DIM), np.float32), np.zeros((3, DIM), np.int32)
    weights = np.linspace(-1, 1, len(inverse), dtype=np.float32)
    weights_at, argmax_at = address(device, weights), address(device, argmax)
    rows.lookup_pooled(args, bags, address(device, out), weights_at, argmax_at)
    sequence, grads = np.zeros((len(inverse), DIM), np.float32), np.zeros(len(inverse), np.float32)
    rows.lookup_rows(args, address(device, sequence), DIM)
    grad = some_rows(20, 1).view(np.float32).reshape(-1)[: len(inverse) * DIM].copy()
    rows.weight_grads(args, bags, address(device, grad), address(device, grads))
    trained = grad.copy()
    if not finite:
        trained[0] = np.inf
    grad_at = address(device, trained)
    start, positions = core.build_csr(inverse, len(at))
    update = core.UpdateArgs(
        dim=DIM, slots=at, csr_start=start, csr_positions=positions, step=step_of(1), check_finite=True
    )
    rejected = [
        rows.update_pooled(update, bags, grad_at, weights_at, argmax_at),
        rows.update_rows(update, grad_at, DIM),
    ]
    after = read(rows, np.arange(16, dtype=np.int32))
    finish(device)
    return [out, argmax[2:], sequence, grads, *rejected, after]


@pytest.mark.parametrize("finite", [True, False])
def test_kernels_give_the_bits_of_the_host(device: Device, finite: bool) -> None:
    got, expected = (trained(d, filled(d)[0], finite=finite) for d in (device, HOST))
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), theirs.view(np.uint8))
    assert bool(len(got[4])) == bool(len(got[5])) == (not finite)


def test_squares_leave_rows_alone(device: Device) -> None:
    (rows, data), (at, inverse, _) = filled(device), batch()
    start, positions = core.build_csr(inverse, len(at))
    grad, squares = np.ones((len(inverse), DIM), np.float32), np.zeros(len(at), np.float32)
    update = core.UpdateArgs(
        dim=DIM, slots=at, csr_start=start, csr_positions=positions, step=step_of(1), squares=squares
    )
    grad_at = address(device, grad)
    assert not len(rows.update_rows(update, grad_at, DIM))
    assert squares.tolist() == [DIM * 4, DIM * 4, DIM * 9]
    once = core.UpdateArgs(
        dim=DIM,
        slots=slots(3, 3, 3),
        csr_start=start,
        csr_positions=positions,
        step=step_of(1),
        squares=squares,
    )
    squares[:] = 0
    assert not len(rows.update_rows(once, grad_at, DIM))
    assert squares.tolist() == [DIM * 4, DIM * 4, DIM * 9]
    np.testing.assert_array_equal(read(rows, np.arange(16, dtype=np.int32)), data)


def test_what_does_not_fit_is_refused(device: Device) -> None:
    rows, data = filled(device)
    for bad in (0, 40):
        with pytest.raises(ValueError, match="multiple of 16"):
            device.allocate(4, bad)
    with pytest.raises(ValueError, match="shape"):
        rows.copy_in(slots(0, 1), data[:1])
    with pytest.raises(ValueError, match="shape"):
        rows.copy_out(slots(0), np.zeros((1, ROW + 16), np.uint8))
    with pytest.raises(ValueError, match="differ"):
        rows.copy_in(slots(0, 1), data, slots(0))
    with pytest.raises(ValueError, match="differ"):
        rows.initialise(values(), slots(0), np.array([1, 2], np.uint64))
    np.testing.assert_array_equal(read(rows, np.arange(16, dtype=np.int32)), data)


def test_rows_that_overflow_a_tier_move_home(device: Device) -> None:
    """A row in an overflow slot goes to the slot that a later plan gives it, when no lookup uses it there."""
    tier = MemoryTier(
        "hbm", TierPlan(16, False, device=device, dim=DIM), ROW, "lru", tables=1, admission="always"
    )
    keys, data = np.arange(20, dtype=np.uint64), some_rows(20)
    plan = tier.native.begin(keys, None, 0)
    tier.evict(0, plan)
    tier.prepare(plan, use_overflow=True)
    tier.native.assign(keys, True, plan)
    tier.copy_in(plan.slots, data)
    first, last = plan.slots.copy(), keys[16:]
    again = tier.native.begin(last, None, 1)
    assert len(again.misses) == 4
    assert not len(again.absent)
    tier.evict(1, again)
    tier.prepare(again, use_overflow=True)
    tier.native.assign(last, True, again)
    tier.release(again.slots)
    assert (tier.slots_of(last) >= 16).all()
    tier.release(first)
    home = tier.slots_of(last)
    assert (home < 16).all()
    np.testing.assert_array_equal(read(tier.rows, home), data[16:])
    tier.drained(tier.native.drainable()[0])
    assert not tier.native.overflow_in_use


@pytest.fixture
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was done to rows of the tiers that the parameter names, which are on the far device."""
    far, (hbm, *lower) = FarDevice(), registry.TIERS

    def far_hbm(asked: TierRequest) -> Tier | None:
        plan = asked.slots["hbm"]
        assert plan is not None
        return hbm(replace(asked, slots={**asked.slots, "hbm": replace(plan, device=far)}))

    if request.param == "all":
        monkeypatch.setattr(HostDevice, "allocate", lambda self, *size: far.allocate(*size))
        monkeypatch.setattr(HostDevice, "load", lambda self, *rows: far.load(*rows))
    elif request.param == "hbm":
        monkeypatch.setattr(registry, "TIERS", [far_hbm, *lower])
    return far.log


RESULTS: dict[str, list[torch.Tensor]] = {}


def outputs(prefetch: bool) -> list[torch.Tensor]:
    """Outputs, gradients of weights, a norm of gradients, and rows: what a training gives whose tiers are
    too small for its batches."""
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(400, (30, 3), generator=generator) for _ in range(12)]
    config = TierConfig(hbm="4KiB", uvm="8KiB", ssd="1GiB", engine="memory")
    with TieredEmbeddingBag(
        400, 8, mode="sum", config=config, optimizer=optim.RowWiseAdagrad(lr=0.1)
    ) as table:
        found = []
        for ids in tierstore.prefetch(batches, table, depth=2, window=4) if prefetch else batches:
            weights = torch.rand(ids.shape, generator=generator, requires_grad=True)
            out = table(ids, per_sample_weights=weights)
            out.square().sum().backward()
            assert weights.grad is not None
            found += [out.detach().clone(), weights.grad]
        with tierstore.accumulate(table) as rows:
            for ids in batches[:3]:
                table(ids).square().sum().backward()
            found.append(torch.nn.utils.clip_grad_norm_(rows.parameters(), 1.0))
        with torch.no_grad():
            found.append(table(batches[0]).clone())
        return [*found, table.rows(torch.arange(400))]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("log", ["none", "all", "hbm"], indirect=True)
def test_training_is_the_same_on_every_device(
    log: list[str], prefetch: bool, request: pytest.FixtureRequest
) -> None:
    found = outputs(prefetch)
    expected = RESULTS.setdefault("rows", found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    on_far = request.node.callspec.params["log"] != "none"
    assert ({"initialise", "copy_in", "update", "discard"} <= set(log)) == on_far


def test_a_kind_of_device_that_nothing_opens(monkeypatch):
    monkeypatch.delitem(OPENERS, "cuda", raising=False)
    with pytest.raises(ConfigError, match=r"'cuda:1'.* opens cpu alone; import tierstore\.modules"):
        open_device("cuda:1")
