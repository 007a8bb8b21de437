"""Who takes part: the ranks of a job, and everything that sharded collections say to one another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.errors import ConfigError, RankError, TierStoreError


class Pending:
    """A collective on its way. What it sends and fills must not be touched before :meth:`wait`."""

    def __init__(self, work: Any, *kept: Tensor) -> None:
        self._work, self._kept = work, kept

    def wait(self) -> None:
        """Raises RankError if a rank is lost. Waiting again does nothing."""
        work, self._work, self._kept = self._work, None, ()
        if work is not None:
            with _all_ranks():
                work.wait()


@dataclass
class Traffic:
    """What this rank has sent to others in all-to-alls: ids, vectors, gradients and weights, in bytes."""

    bytes_sent: int = 0


@dataclass(frozen=True)
class ShardingEnv:
    """Ranks and groups. ``inputs`` and ``outputs`` are gloo groups of their own, since the rows are in host
    memory, and so that an exchange of ids made ahead never mixes with those of forward and backward passes.

    Make one with :meth:`from_process_group`; all ranks call it.
    """

    rank: int
    world_size: int
    process_group: Any
    inputs: Any
    outputs: Any
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    _known: ClassVar[dict[str, ShardingEnv]] = {}

    @classmethod
    def from_process_group(cls, group: Any = None, timeout: timedelta | None = None) -> ShardingEnv:
        """``group``: the ranks that share the tables, the default group if None. ``timeout``: after which a
        collective that some rank does not join fails on the others; that of ``group`` if None."""
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; start the ranks with torchrun and call "
                'torch.distributed.init_process_group("gloo") first'
            )
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise ConfigError("this rank is not in the group; only the ranks of the group share its tables")
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout or _timeout_of(group)
        # Some ranks alone can make a group, but torch hangs if they are in different numbers of groups.
        some = len(ranks) < dist.get_world_size()

        def new() -> Any:
            with _all_ranks():
                return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)

        return cls(dist.get_rank(group), len(ranks), group, new(), new())

    @classmethod
    def of(cls, env: Any) -> ShardingEnv:
        """``env`` itself; or that of what may be given instead: None (the default group), a process group, or
        torchrec's ShardingEnv. All ranks call it. It is made once for each group, since gloo's groups take
        threads and sockets for every pair of ranks."""
        if isinstance(env, cls):
            return env
        group = getattr(env, "process_group", env)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"env is {env!r}; use None, or ShardingEnv.from_process_group(group)")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        known = cls._known.get(getattr(group, "group_name", ""))
        if known is None or known.process_group is not group:  # torch uses names again
            known = cls.from_process_group(group)
            cls._known[known.process_group.group_name] = known
        return known

    @property
    def others_first(self) -> list[int]:
        """The other ranks, then this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank] + [self.rank]

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Any = None
    ) -> Pending:
        """Begins to send ``leaving[r]`` elements of ``given`` to each rank r, and to fill ``out`` with
        ``arriving[r]`` from it; all ranks do. ``group``: ``outputs`` if None."""
        if self.world_size == 1:
            out.copy_(given)
            return Pending(None)
        self.traffic.bytes_sent += given.element_size() * (sum(leaving) - leaving[self.rank])
        with _all_ranks():
            work = dist.all_to_all_single(
                out, given, list(arriving), list(leaving), group=group or self.outputs, async_op=True
            )
        return Pending(work, out, given)

    def send_and_receive(self, given: dict[int, Tensor], sizes: dict[int, int]) -> dict[int, Tensor]:
        """Sends ``given[r]`` (float32, 1-D) to each rank r and returns ``sizes[r]`` floats from it. Nothing
        is said where there is nothing to send, so only the ranks concerned take part."""
        arrived = {rank: torch.empty(size) for rank, size in sizes.items()}
        peers = dist.get_process_group_ranks(self.outputs)
        with _all_ranks():
            works = [dist.irecv(to, peers[rank], self.outputs) for rank, to in arrived.items() if len(to)]
            for rank, tensor in given.items():
                if len(tensor):
                    self.traffic.bytes_sent += tensor.nbytes
                    works.append(dist.isend(tensor, peers[rank], self.outputs))
            for work in works:
                assert work is not None
                work.wait()
        return arrived

    def gather(self, tensor: Tensor, group: Any = None) -> tuple[Pending, Tensor]:
        """Begins to collect a tensor of the same shape of every rank: (ranks, *shape)."""
        everyone = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype)
        with _all_ranks():
            work = dist.all_gather(list(everyone), tensor, group=group or self.outputs, async_op=True)
        return Pending(work, tensor), everyone

    def gather_objects(self, value: Any, group: Any = None) -> list[Any]:
        """What every rank gives. All ranks call it."""
        found: list[Any] = [None] * self.world_size
        with _all_ranks():
            dist.all_gather_object(found, value, group=group or self.outputs)
        return found

    def broadcast_objects(self, values: list[Any]) -> None:
        """Replaces ``values`` by those of rank 0. All ranks call it."""
        with _all_ranks():
            dist.broadcast_object_list(values, src=dist.get_global_rank(self.outputs, 0), group=self.outputs)

    def barrier(self) -> None:
        with _all_ranks():
            dist.barrier(group=self.outputs)

    def agree(self, error: Exception | None, kind: type[TierStoreError] = ConfigError) -> None:
        """Raises ``kind`` on every rank if any rank has an error. All ranks call it."""
        failed = torch.tensor([int(error is not None)])
        with _all_ranks():
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.outputs)
        if failed.item():
            self.raise_together(error, self.outputs, kind)

    @contextmanager
    def together(self, kind: type[TierStoreError] = ConfigError) -> Iterator[None]:
        """What is done within fails on every rank, with ``kind``, if it fails on any. All ranks do it."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # the others must not wait
            error = raised
        self.agree(error, kind)

    def check_same(self, values: Mapping[str, Any]) -> None:
        """ConfigError on every rank, which names them, unless all give equal values (in their ``repr``). All
        ranks call it."""
        digests = b"".join(hashlib.sha256(repr(value).encode()).digest() for value in values.values())
        pending, everyone = self.gather(torch.frombuffer(bytearray(digests), dtype=torch.uint8))
        pending.wait()
        different = (everyone != everyone[0]).view(self.world_size, len(values), -1).any(dim=2)
        for rank, those in enumerate(different.tolist()):
            if any(those):
                what = ", ".join(name for name, other in zip(values, those, strict=True) if other)
                raise ConfigError(f"rank {rank} was given other {what} than rank 0; give all ranks the same")

    def raise_together(self, error: Exception | None, group: Any, kind: type[TierStoreError]) -> NoReturn:
        """Raises ``kind`` on every rank, with what all ranks that have an error say."""
        own = None if error is None else str(error) or type(error).__name__
        found: list[str | None] = self.gather_objects(own, group)
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(found):
            if text is not None:
                ranks.setdefault(text, []).append(str(rank))
        if len(found) in map(len, ranks.values()):
            raise kind(next(iter(ranks))) from error
        said = (f"rank {', '.join(those)}: {text}" for text, those in ranks.items())
        raise kind("; ".join(said)) from error

    def least(self, value: int) -> int:
        """The smallest ``value`` of any rank. All ranks call it."""
        smallest = torch.tensor([value])
        with _all_ranks():
            dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.inputs)
        return int(smallest.item())

    def sum_bits(self, tensor: Tensor) -> Tensor:
        """Adds up a float32 tensor of which every element is non-zero bits on at most one rank; in place.

        Exact: the bits are added as integers."""
        with _all_ranks():
            dist.all_reduce(tensor.view(torch.int32), group=self.outputs)
        return tensor


def _timeout_of(group: Any) -> timedelta | None:
    """What ``init_process_group`` or ``new_group`` was given, which further groups do not inherit; None if
    the group has no CPU backend."""
    try:
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return None
    return found


@contextmanager
def _all_ranks() -> Iterator[None]:
    """Around every collective: torch says that a rank is gone, or too late, with a bare RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"another rank of the job has died or does not answer ({error}). Nothing of this step, or of a "
            "commit under way, counts; start the job again, and it goes on from the last commit of all ranks "
            "(set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun to restart ranks by itself)"
        ) from error
