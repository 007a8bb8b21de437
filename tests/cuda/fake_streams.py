"""torch's streams and events on the fake GPU: who uses a tensor's memory must come after who wrote it.

Operations of torch and kernels of ours are given to the current stream of their thread. A use that streams,
events and waits of the host do not order after the write is reported, and so is memory that comes back to the
allocator while a stream uses it that is neither the one that it was made on nor recorded. All streams are the
driver's stream 0, so values are right; only the order is checked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from tests.cuda import fake_torch
from tests.cuda.fake_torch import GpuTensor

Clock = dict["TorchStream", int]
"""How many operations of each stream are done."""


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


class TorchEvent:
    """What a stream had been given, and what it had waited for, when the event was recorded."""

    def __init__(self, stream: TorchStream) -> None:
        self.device, self._host, self.seen = stream.device, stream.host, dict(stream.seen)

    def synchronize(self) -> None:
        _join(self._host, self.seen)


class TorchStream:
    """``torch.cuda.Stream``. ``host``: what the host has waited for."""

    cuda_stream = 0

    def __init__(self, device: int, host: Clock) -> None:
        self.device = torch.device("cuda", device)
        self.host, self.seen, self.number = host, Clock(), 0

    def operation(self) -> int:
        """Give the stream an operation; return its number."""
        _join(self.seen, self.host)
        self.number += 1
        self.seen[self] = self.number
        return self.number

    def record_event(self) -> TorchEvent:
        return TorchEvent(self)

    def wait_event(self, event: TorchEvent) -> None:
        _join(self.seen, event.seen)

    def wait_stream(self, other: TorchStream) -> None:
        _join(self.seen, other.seen)


@dataclass
class _Memory:
    """Of a tensor: the stream that it was made on, who wrote it last, who has used it since, and which
    streams the allocator was told of."""

    made: TorchStream
    written: tuple[TorchStream, int]
    used: Clock = field(default_factory=Clock)
    recorded: set[TorchStream] = field(default_factory=set)


class Streams:
    """The current streams of all threads, and what is wrong."""

    def __init__(self, devices: int) -> None:
        self.wrong: list[str] = []
        self.host = Clock()
        self._lock = threading.RLock()
        self._plain = [TorchStream(number, self.host) for number in range(devices)]
        self._chosen = threading.local()
        self._memory: dict[int, _Memory] = {}

    def current(self, device: Any = None) -> TorchStream:
        if isinstance(device, str | torch.device):
            device = torch.device(device).index
        chosen: dict[int, TorchStream] = self._chosen.__dict__
        return chosen.get(f"{device or 0}", self._plain[device or 0])

    def side(self, device: int = 0) -> TorchStream:
        return TorchStream(device, self.host)

    @contextmanager
    def on(self, stream: TorchStream) -> Iterator[None]:
        """``torch.cuda.stream(stream)``"""
        with mock.patch.dict(self._chosen.__dict__, {f"{stream.device.index}": stream}):
            yield

    def touch(self, tensor: GpuTensor, *, write: bool, waits: bool = False) -> None:
        with self._lock:
            stream, storage = self.current(tensor.number), tensor.inner.untyped_storage()
            number = stream.operation()
            memory = self._memory.get(storage._cdata)
            if memory is None:
                memory = self._memory[storage._cdata] = _Memory(stream, (stream, number))
                weakref.finalize(storage, self._freed, storage._cdata).atexit = False
            for other, last in [memory.written, *(memory.used.items() if write else ())]:
                if stream.seen.get(other, 0) < last:
                    self.wrong.append(f"a stream of {stream.device} does not wait for another one")
            memory.used[stream] = number
            if write:
                memory.written, memory.used = (stream, number), {stream: number}
            if waits:
                _join(self.host, stream.seen)

    def record(self, tensor: GpuTensor, stream: TorchStream) -> None:
        self._memory[tensor.inner.untyped_storage()._cdata].recorded.add(stream)

    def _freed(self, number: int) -> None:
        with self._lock:
            memory = self._memory.pop(number)
            _join(memory.made.seen, self.host)
            for stream, last in memory.used.items():
                if stream not in memory.recorded and memory.made.seen.get(stream, 0) < last:
                    self.wrong.append("memory is freed while a stream uses it that was not recorded")


@contextmanager
def fake_streams(devices: int = 1) -> Iterator[Streams]:
    """Streams of torch, inside of ``fake_torch``; the caller looks at ``wrong``."""
    streams = Streams(devices)
    with (
        mock.patch.object(fake_torch, "watch", streams),
        mock.patch.object(torch.cuda, "current_stream", streams.current),
        mock.patch.object(torch.cuda, "stream", streams.on),
        mock.patch.object(torch.cuda, "Stream", streams.side),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
    ):
        yield streams
