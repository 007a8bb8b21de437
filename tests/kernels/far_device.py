"""A device that holds rows one by one in a dictionary, and notices what no device may be asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tierstore import _core as core
from tierstore.cache.device import HOST, ComputedRows, HostUpdates

Array = np.ndarray


class FarRows:
    """Rows that only the operations of ``DeviceRows`` reach. A slot must have memory, and a row that is read
    must have been written."""

    def __init__(self, slots: int, row_bytes: int, log: list[str], weights: str = "fp32") -> None:
        if row_bytes <= 0 or row_bytes % 16:
            raise ValueError("row_bytes must be a positive multiple of 16")
        self.row_bytes, self._slots, self._committed = row_bytes, slots, 0
        self._weights = weights
        self._rows: dict[int, bytes] = {}
        self._log = log

    def commit(self, slots: int) -> None:
        if slots > self._slots:
            raise ValueError("there are not so many slots")
        self._committed = max(self._committed, slots)

    def discard(self, first: int) -> None:
        self._log.append("discard")
        self._rows = {slot: row for slot, row in self._rows.items() if slot < first}

    def move(self, source: Array, target: Array) -> None:
        assert len(np.unique(np.concatenate([source, target]))) == len(source) + len(target)
        rows = self._read(source)
        for slot in source.tolist():
            del self._rows[slot]  # nobody looks for it there any more
        self._write("move", target, rows)

    def initialise(self, values: core.InitialValues, slots: Array | None, keys: Array) -> None:
        slots = np.arange(len(keys), dtype=np.int32) if slots is None else slots
        if len(slots) != len(keys):
            raise ValueError("slots and keys differ in length")
        rows = np.empty((len(keys), self.row_bytes), np.uint8)
        self._view(rows).initialise(values, None, keys)
        self._write("initialise", slots, rows)

    def copy_out(self, slots: Array, out: Array) -> None:
        if out.shape[1] != self.row_bytes or len(out) < len(slots):
            raise ValueError("the other rows must have the shape (n, row_bytes)")
        out[: len(slots)] = self._read(slots)

    def copy_rows(self, slots: Array, rows: FarRows, source: Array) -> None:
        if rows.row_bytes != self.row_bytes or len(source) != len(slots):
            raise ValueError("source and slots differ in length, or the rows do")
        self._write("copy_rows", slots, rows._read(source))

    def copy_in(self, slots: Array, rows: Array, source: Array | None = None) -> None:
        if rows.shape[1] != self.row_bytes or (source is None and len(rows) < len(slots)):
            raise ValueError("the other rows must have the shape (n, row_bytes)")
        if source is not None and len(source) != len(slots):
            raise ValueError("source and slots differ in length")
        self._write("copy_in", slots, rows[: len(slots)] if source is None else rows[source])

    def encode(self, codec: core.RowCodec, keys: Array, out: Array, slots: Array | None = None) -> int:
        slots = np.arange(len(keys), dtype=np.int32) if slots is None else slots
        return core.HostRows.view(self._read(slots)).encode(codec, keys, out)

    def decode(
        self, codec: core.RowCodec, rows: Array, slots: Array | None = None, source: Array | None = None
    ) -> None:
        slots = np.arange(len(rows if source is None else source), dtype=np.int32) if slots is None else slots
        near = np.empty((len(slots), self.row_bytes), np.uint8)
        core.HostRows.view(near).decode(codec, rows[: len(slots)] if source is None else rows[source])
        self._write("decode", slots, near)

    def lookup_pooled(self, args: core.LookupArgs, bags: core.Bags, *addresses: int) -> None:
        near, args = self._near(args)
        near.lookup_pooled(args, bags, *addresses)

    def lookup_rows(self, args: core.LookupArgs, out_addr: int, out_stride: int) -> None:
        near, args = self._near(args)
        near.lookup_rows(args, out_addr, out_stride)

    def weight_grads(self, args: core.LookupArgs, bags: core.Bags, grad_addr: int, out_addr: int) -> None:
        near, args = self._near(args)
        near.weight_grads(args, bags, grad_addr, out_addr)

    def update_pooled(self, args: core.UpdateArgs, bags: core.Bags, *rest: Any) -> Array:
        return self._update(args, lambda near, own: near.update_pooled(own, bags, *rest))

    def update_rows(self, args: core.UpdateArgs, *rest: Any) -> Array:
        return self._update(args, lambda near, own: near.update_rows(own, *rest))

    def _view(self, rows: Array) -> core.HostRows:
        return core.HostRows.view(rows, self._weights)

    def _near(self, args: core.LookupArgs) -> tuple[core.HostRows, core.LookupArgs]:
        slots = np.arange(len(args.slots), dtype=np.int32)
        near = self._view(self._read(args.slots))
        return near, core.LookupArgs(dim=args.dim, slots=slots, inverse=args.inverse)

    def _update(
        self, args: core.UpdateArgs, update: Callable[[core.HostRows, core.UpdateArgs], Array]
    ) -> Array:
        rows = self._read(args.slots)
        own = core.UpdateArgs(
            dim=args.dim, slots=np.arange(len(rows), dtype=np.int32), csr_start=args.csr_start,
            csr_positions=args.csr_positions, step=args.step, check_finite=args.check_finite,
            squares=args.squares, means=args.means,
        )  # fmt: skip
        rejected = update(self._view(rows), own)
        if args.squares is None:
            self._write("update", args.slots, rows)
        return rejected

    def _read(self, slots: Array) -> Array:
        rows = b"".join(self._rows[slot] for slot in slots.tolist())
        return np.frombuffer(rows, np.uint8).reshape(-1, self.row_bytes).copy()

    def _write(self, what: str, slots: Array, rows: Array) -> None:
        self._log.append(what)
        assert slots.dtype == np.int32
        assert len(np.unique(slots)) == len(slots)
        assert not len(slots) or 0 <= slots.min() <= slots.max() < self._committed
        self._rows.update(zip(slots.tolist(), (row.tobytes() for row in rows), strict=True))


@dataclass(frozen=True)
class FarDevice:
    """``log``: what was done to rows, in order."""

    log: list[str] = field(default_factory=list, compare=False)
    name = "cpu"  # where it finds tensors

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def prepare(self, rows: Collection[ComputedRows] = (), updated: Collection[ComputedRows] = ()) -> None:
        """Do nothing."""

    def ready_updates(self, updates: Sequence[partial[Array]]) -> AbstractContextManager[HostUpdates]:
        return nullcontext(HostUpdates(updates))

    makes_from = HOST.makes_from

    def make_batch(self, segments: Sequence[core.IdSegment]) -> tuple[core.Batch, int, int, int]:
        return HOST.make_batch(segments)

    def stage(self, *arrays: object) -> object:
        return None

    def takes(self, rows: object) -> bool:
        return isinstance(rows, FarRows)

    def uvm(self, kind: str) -> FarDevice:
        return self

    def staging(self, slots: int, row_bytes: int) -> FarRows:
        return self.allocate(slots, row_bytes)

    def close(self) -> None:
        """Do nothing."""

    def allocate(
        self, slots: int, row_bytes: int, weights: str = "fp32", dim: int = 0, kept: int | None = None
    ) -> FarRows:
        return FarRows(slots, row_bytes, self.log, weights)

    def load(self, rows: Array, weights: str = "fp32") -> FarRows:
        far = FarRows(max(1, len(rows)), rows.shape[1], [], weights)
        far.commit(len(rows))
        far.copy_in(np.arange(len(rows), dtype=np.int32), rows)
        return far
