"""Random operations on rows of a GPU, each also done by the host at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from tests.cuda.fake_device import FakeDevice
from tests.kernels.kernel_oracle import Step
from tierstore import GpuError
from tierstore import _core as core
from tierstore.cuda import lookups
from tierstore.cuda.compute import CudaRows
from tierstore.cuda.rows import Departure
from tierstore.cuda.staged import Staged
from tierstore.row_format import RowFormat

SLOTS = 40
Csr = tuple[np.ndarray, np.ndarray]


class Batch(NamedTuple):
    """Rows, bags, weights, floats of the output, and the positions of every row: as the GPU takes them, and
    as the host does, who may not have what the GPU has made."""

    args: core.LookupArgs
    bags: core.Bags
    weights: np.ndarray
    size: int
    csr: Csr
    host_args: core.LookupArgs
    host_csr: Csr


class RandomWork:
    """``rows`` on a fake GPU and ``host``, their twins. Slots are filled before they are used.

    ``kind``: of the optimizer; ``weights``: the dtype; ``dim``: 3, 8, 20 or 32. The GPU cuts rows of 32
    columns if they have state.
    """

    def __init__(self, device: FakeDevice, dim: int, kind: int, seed: int, weights: str = "fp32") -> None:
        self.device, self.dim, self.kind, self.weights = device, dim, kind, weights
        self.random = np.random.default_rng(seed)
        self.row_bytes = RowFormat(weights).row_bytes(dim, Step(kind=kind).state_floats(dim))
        self.rows: CudaRows = device.allocate(SLOTS, self.row_bytes, weights, dim)
        self.host = core.HostRows(SLOTS, self.row_bytes, weights)
        self.committed = 0
        self.filled: set[int] = set()
        self.outputs: list[tuple[np.ndarray, np.ndarray]] = []
        self.departures: list[tuple[Departure, np.ndarray]] = []
        self.planned: list[tuple[Batch, Staged]] = []

    # -- one kind of operation each ------------------------------------------------------------

    def grow(self) -> None:
        self.committed = min(SLOTS, self.committed + int(self.random.integers(1, 20)))
        self.rows.commit(self.committed)
        self.host.commit(self.committed)

    def fill(self) -> None:
        slots, rows = self._slots(range(self.committed)), self._data(9)
        source = self.random.integers(0, 9, len(slots)).astype(np.int32)
        chosen = None if len(slots) <= 9 and self.random.random() < 0.5 else source
        for where in (self.rows, self.host):
            where.copy_in(slots, rows, chosen)
        rows[:] = 0  # the caller's rows are the caller's again
        self.filled |= set(slots.tolist())

    def initialise(self) -> None:
        slots = self._slots(range(self.committed))
        values = core.InitialValues(
            dim=self.dim, state_floats=1, state_value=0.5, kinds=np.array([2], np.uint8),
            first=np.zeros(1, np.float32), second=np.ones(1, np.float32), seeds=np.array([7], np.uint64),
        )  # fmt: skip
        if self.row_bytes < RowFormat(self.weights).row_bytes(self.dim, 1):
            return
        keys = self.random.integers(0, 1 << 40, len(slots), dtype=np.uint64)
        for where in (self.rows, self.host):
            where.initialise(values, slots, keys)
        self.filled |= set(slots.tolist())

    def move(self) -> None:
        both = self._slots(self.filled)
        source, target = both[: len(both) // 2], both[len(both) // 2 :][: len(both) // 2]
        for where in (self.rows, self.host):
            where.move(source, target)

    def stage(self) -> None:
        """Plan a lookup, which several operations then make."""
        batch = self._new_batch()
        if self.random.random() < 0.5:
            batch = self._made(batch)
        staged = self.device.stage(batch.args.slots, batch.args.inverse, batch.csr, batch.bags.arrays)
        self.planned = [*self.planned[-1:], (batch, staged)]

    def _made(self, planned: Batch) -> Batch:
        """Return a lookup of the same bags that the device has made of ids, if it makes one."""
        ids = planned.args.inverse.astype(np.int64) % SLOTS  # of -1: the last one, which is skipped
        segments = [(ids.ctypes.data, len(ids), False, 0, SLOTS, SLOTS - 1)]
        with mock.patch.object(lookups, "MAKES_FROM", 1):
            made, *_ = self.device.make_batch(segments)
        host, *_ = core.make_batch(segments)
        np.testing.assert_array_equal(made.unique, host.unique)
        if not len(host.unique):
            return planned
        assert isinstance(made, lookups.GpuBatch)
        slots = planned.args.slots[host.unique.astype(np.int64)]
        if self.random.random() < 0.2:
            np.testing.assert_array_equal(made.inverse, host.inverse)
        args = core.LookupArgs(dim=self.dim, slots=slots, inverse=made.device_inverse)
        host_args = core.LookupArgs(dim=self.dim, slots=slots, inverse=host.inverse)
        return planned._replace(
            args=args, csr=made.transposed(), host_args=host_args, host_csr=host.transposed()
        )

    def leave(self) -> None:
        """Copy rows out; their slots may be filled while the rows are on their way."""
        slots = self._slots(self.filled)
        out = np.zeros((len(slots), self.row_bytes), np.uint8)
        self.host.copy_out(slots, out)
        self.departures.append((self.rows.start_copy_out(slots), out))

    def arrive(self) -> None:
        if self.departures:
            departure, expected = self.departures.pop(int(self.random.integers(len(self.departures))))
            np.testing.assert_array_equal(departure.arrive(), expected)
            departure.end()

    def lookup(self) -> None:
        args, bags, weights, size, _, host_args, _ = self._batch()
        out, argmax = np.zeros(size, np.float32), np.full((len(bags.offsets) - 1, self.dim), -9, np.int32)
        positions, stride = len(args.inverse), self.dim + int(self.random.integers(3))
        for shape in ((out, weights, argmax), np.zeros((positions, stride), np.float32)):
            if isinstance(shape, tuple):
                ours, theirs = [a.copy() for a in shape], [a.copy() for a in shape]
                self.rows.lookup_pooled(args, bags, *(self.device.share(a) for a in ours))
                self.host.lookup_pooled(host_args, bags, *(a.ctypes.data for a in theirs))
                self.outputs += zip(ours, theirs, strict=True)
            else:
                mine = shape.copy()
                self.rows.lookup_rows(args, self.device.share(mine), stride)
                self.host.lookup_rows(host_args, shape.ctypes.data, stride)
                self.outputs.append((mine, shape))

    def differentiate(self) -> None:
        args, bags, weights, size, _, host_args, _ = self._batch()
        grad = self.random.standard_normal(size).astype(np.float32)
        mine, expected = np.zeros_like(weights), np.zeros_like(weights)
        self.rows.weight_grads(args, bags, self.device.share(grad), self.device.share(mine))
        self.host.weight_grads(host_args, bags, grad.ctypes.data, expected.ctypes.data)
        self.outputs.append((mine, expected))

    def update(self) -> None:
        args, bags, weights, size, csr, _, host_csr = self._batch()
        checks = self.random.random() < 0.2
        step = core.OptimizerStep(kind=self.kind, lr=0.1, eps=1e-8, beta1=0.9, beta2=0.99, step=3)
        given, of_host = (
            core.UpdateArgs(
                dim=self.dim, slots=args.slots, csr_start=start, csr_positions=positions, step=step,
                check_finite=checks,
            )
            for start, positions in (csr, host_csr)
        )  # fmt: skip
        rounding = None
        if self.random.random() < 0.5:
            keys = self.random.integers(0, 1 << 40, len(args.slots), dtype=np.uint64)
            rounding = core.UpdateRounding(keys=keys, seeds=np.array([5], np.uint64), columns=np.array([3]))
        argmax = np.full((len(bags.offsets) - 1, self.dim), int(host_csr[1].max(initial=0)), np.int32)
        if self.random.random() < 0.5:
            grad = self._gradients(size, checks)
            ours = self.rows.update_pooled(
                given, bags, *(self.device.share(a) for a in (grad, weights, argmax)), rounding
            )
            at = (a.ctypes.data for a in (grad, weights, argmax))
            theirs = self.host.update_pooled(of_host, bags, *at, rounding)
        else:
            grad = self._gradients(len(args.inverse) * self.dim, checks)
            ours = self.rows.update_rows(given, self.device.share(grad), self.dim, rounding)
            theirs = self.host.update_rows(of_host, grad.ctypes.data, self.dim, rounding)
        assert ours.tolist() == theirs.tolist()

    # -- all of them -----------------------------------------------------------------------------

    def do(self, operations: int) -> None:
        """Do random operations, and compare everything at the end."""
        names = (
            *("fill", "initialise", "move", "leave", "arrive", "stage"),
            *("lookup", "differentiate", "update", "grow"),
        )
        weights = np.array([5, 1, 1, 3, 2, 2, 3, 1, 4, 0.3])
        self.grow()
        self.fill()
        for name in self.random.choice(names, operations, p=weights / weights.sum()):
            getattr(self, str(name))()
        while self.departures:
            self.arrive()
        everything = np.array(sorted(self.filled), np.int32)
        mine, expected = (np.zeros((len(everything), self.row_bytes), np.uint8) for _ in range(2))
        self.rows.copy_out(everything, mine)
        self.host.copy_out(everything, expected)
        np.testing.assert_array_equal(mine, expected)
        self.device.synchronize()
        for ours, theirs in self.outputs:
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))

    def _slots(self, of: object, most: int = 9) -> np.ndarray:
        chosen = self.random.permutation(sorted(of))[: self.random.integers(1, most + 1)]  # type: ignore[call-overload]
        return chosen.astype(np.int32)

    def _data(self, n: int) -> np.ndarray:
        rows = self.random.random((n, self.row_bytes // 4), np.float32).view(np.uint8)
        if self.weights != "fp32":
            weights = self.random.integers(0, 0x3C00, (n, self.dim), np.uint16)  # positive numbers
            rows[:, : 2 * self.dim] = weights.view(np.uint8)
        return rows

    def _gradients(self, size: int, may_be_infinite: bool) -> np.ndarray:
        grad = self.random.standard_normal(size).astype(np.float32)
        if may_be_infinite:
            grad[self.random.random(size) < 0.05] = np.inf
        return grad

    def _batch(self) -> Batch:
        """Return a lookup that was planned, or another one."""
        if self.planned and self.random.random() < 0.6:
            return self.planned[int(self.random.integers(len(self.planned)))][0]
        return self._new_batch()

    def _new_batch(self) -> Batch:
        slots = self._slots(self.filled)
        lengths = self.random.integers(0, 6, 4)
        n, unique = int(lengths.sum()), len(slots)
        inverse = self.random.integers(-1, unique, n).astype(np.int32)
        stride = self.dim + int(self.random.choice([0, 0, 1]))
        bags = core.Bags(
            offsets=np.concatenate([[0], np.cumsum(lengths)]), bag_start=np.array([0, 2, 3, 4]),
            out_offset=np.array([0, 2, 3]) * stride, out_stride=np.full(3, stride),
            modes=np.array([0, 1, 2], np.uint8),
        )  # fmt: skip
        args = core.LookupArgs(dim=self.dim, slots=slots, inverse=inverse)
        weights = self.random.standard_normal(n).astype(np.float32)
        csr = core.build_csr(inverse, unique)
        return Batch(args, bags, weights, 4 * stride, csr, args, csr)


def kernels_are_kept(
    opened: Callable[[Sequence[str] | None], Any], compiler: Sequence[str] | None, folder: Path
) -> None:
    """Work with a cold cache of kernels in ``folder``, with a warm one, and with one that is damaged.

    ``opened``: makes a device that keeps its kernels there, with paths of NVRTC; ``compiler``: such paths of
    one that works.
    """
    nowhere = ["/nowhere/libnvrtc.so"]

    def works(nvrtc: Sequence[str] | None) -> None:
        device = opened(nvrtc)
        work = RandomWork(device, 8, 1, seed=5)
        work.do(60)
        del work
        device.close()

    without = opened(nowhere)
    with pytest.raises(GpuError, match="NVRTC"):
        without.prepare()
    without.close()
    works(compiler)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) >= 3  # any layout, lookups, updates
    works(nowhere)  # nothing is compiled
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    works(compiler)
    assert {path.name for path in folder.iterdir()} == kept.keys()
    works(nowhere)
