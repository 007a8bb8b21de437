"""One batch of a prefetch on its way from the loader to its forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tierstore.cache.group import TierGroup
from tierstore.cache.pinned_rows import PinnedRows
from tierstore.errors import RankError
from tierstore.modules.ahead import Ahead, Content
from tierstore.modules.base import TieredModule
from tierstore.modules.gpu import current_streams, on_streams
from tierstore.pipeline.learning import tensors_of
from tierstore.threads import Gate


@dataclass(eq=False)
class Planned:
    """One batch on its way: its lookups, and the first lookup number of each group."""

    batch: Any
    aheads: list[tuple[TieredModule, Ahead]] = field(default_factory=list)
    lookups: list[tuple[TierGroup, PinnedRows]] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)  # what the lookups made ahead have read of the batch
    last: int = -1  # place of its last lookup among all of the session
    first: dict[int, int] = field(default_factory=dict)  # id(group) → number of its first lookup
    contents: dict[int, Content] = field(default_factory=dict)  # number of the call → hash of its inputs
    exchanges: dict[int, Any] = field(default_factory=dict)  # number of the call → exchange with other ranks
    made: dict[int, Any] = field(default_factory=dict)  # number of the call → lookup that is made beside
    is_end: bool = False  # it stands for the end behind the last batch
    error: RankError | None = None  # why the ranks cannot go on with this batch
    prepared: Gate = field(default_factory=Gate)
    settled: Gate = field(default_factory=Gate)  # it is planned, or will not be planned ahead
    limit: int | None = None  # batches that may be announced before its plan; None: not known yet
    behind: int | None = None  # batches that were known behind it when it was planned
    fills: bool = False  # whether the window was full when it was announced, and then when it was planned

    def __post_init__(self) -> None:
        self.streams = current_streams(tensors_of(self.batch))
        """The current streams of the thread that pulled the batch."""

    def keep(self, module: TieredModule, ahead: Ahead, read: Sequence[Tensor]) -> None:
        """Keep a lookup made ahead, and the tensors that it has ``read`` of the batch."""
        self.aheads.append((module, ahead))
        self.read += read

    def drop(self) -> None:
        """Drop the lookups made ahead."""
        self.aheads.clear()
        self.read.clear()

    def on_streams(self) -> AbstractContextManager[None]:
        """Return a context in which torch computes on the streams of the thread that pulled the batch: a GPU
        may still have to make the batch's tensors there."""
        return on_streams(self.streams)

    def cancel(self) -> None:
        """Let the forward call of this batch look up on demand, whatever it waits for."""
        for _, pinned in self.lookups:
            pinned.cancel()
        self.prepared.open()
        self.settled.open()

    @property
    def is_ready(self) -> bool:
        """Whether it is a batch whose ids nobody reads any more but its forward call."""
        return self.prepared.is_open and not self.is_end

    @property
    def rows(self) -> int:
        """Distinct rows of the batch on this rank."""
        return sum(len(pinned.batch.unique) for _, pinned in self.lookups)

    @property
    def memory(self) -> set[tuple[int, int]]:
        """Where the batch's tensors are, and their bytes. Batches may share tensors on the CPU; tensors of a
        GPU, whose streams must not be asked here, have the numbers of no address."""
        first = -8 * id(self)
        return {
            (tensor.data_ptr() if tensor.is_cpu else first - number, tensor.nbytes)
            for number, tensor in enumerate(tensors_of(self.batch))
        }

    @property
    def lookup_bytes(self) -> int:
        """Bytes of the batch's lookups while they wait for their turn."""
        lookups = [ahead.lookup for _, ahead in self.aheads if ahead.lookup is not None]
        own = sum(part.nbytes for each in lookups for part in each.parts)
        return own + sum(12 * len(p.batch.unique) + 4 * len(p.batch.device_inverse) for _, p in self.lookups)


class RecentBatches:
    """The last planned batches, whose rows forward passes may still use."""

    def __init__(self) -> None:
        self._first: deque[dict[int, int]] = deque()

    def add(self, planned: Planned, depth: int) -> None:
        """Add the batch that is planned now, and forget those more than ``depth`` batches before it."""
        self._first.append(planned.first)
        while len(self._first) > depth + 1:
            self._first.popleft()

    def pinned_since(self, group: TierGroup) -> int:
        """Return the first lookup number that ``group`` has in these batches."""
        return min(first[id(group)] for first in self._first if id(group) in first)
