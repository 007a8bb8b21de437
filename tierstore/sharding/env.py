"""The ranks of a job, and every collective by which sharded collections exchange data."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.errors import ConfigError, DeviceFullError, GpuError, RankError, StoreFullError, TierStoreError
from tierstore.sharding.gpu_groups import GpuGroups
from tierstore.sharding.peers import AGREEMENTS, GRADIENTS, IDS, SIZES, VECTORS, Collective, Peers


class Pending:
    """A collective on its way. Do not touch the tensors that it sends or fills before :meth:`wait`."""

    def __init__(self, peers: Peers, work: Any, *kept: Tensor, awaited: Collective = ("", 0)) -> None:
        self._peers, self._work, self._kept, self._awaited = peers, work, kept, awaited
        self._on_gpu = any(tensor.device.type != "cpu" for tensor in kept)

    def wait(self) -> None:
        """Wait until it is done; a second call does nothing. For tensors on a GPU the current stream waits,
        and the host goes on. Raises RankError if a rank is lost."""
        work, self._work, kept, self._kept = self._work, None, self._kept, ()
        if work is not None and self._on_gpu:
            self._peers.follow(work)
        elif work is not None:
            self._peers.wait(work, self._awaited)
        del kept


@dataclass
class Traffic:
    """Bytes that this rank has sent to other ranks in all-to-alls: ids, vectors, gradients and weights."""

    bytes_sent: int = 0


@dataclass(frozen=True)
class ShardingEnv:
    """Ranks and groups. ``inputs``, ``outputs`` and ``gradients`` are gloo groups of tensors in host memory:
    ids, which the host plans; agreements, and vectors of tables on the CPU; gradients of these vectors. They
    are separate groups, so that an exchange of ids made ahead never mixes with exchanges of forward and
    backward passes, and so that a rank that leaves out a backward pass does not send its next vectors to a
    rank that waits for gradients. Vectors and gradients of tables on GPUs have an NCCL group (``gpus``).

    Make one with :meth:`from_process_group`; all ranks call it.
    """

    rank: int
    world_size: int
    process_group: Any
    inputs: Any
    outputs: Any
    gradients: Any
    peers: Peers = field(compare=False)
    gpus: GpuGroups = field(compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    _known: ClassVar[dict[str, ShardingEnv]] = {}

    @classmethod
    def from_process_group(cls, group: Any = None, timeout: timedelta | None = None) -> ShardingEnv:
        """Make the environment of ``group``: the ranks that share the tables, the default group if None.
        ``timeout``: when a collective that some rank does not join fails on the other ranks; the timeout of
        ``group`` if None."""
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; start the ranks with torchrun and call "
                'torch.distributed.init_process_group("gloo") first'
            )
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise ConfigError("this rank is not in the group; make tables only on the ranks of the group")
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout or _timeout_of(group)
        # Some ranks alone can make a group, but torch hangs if ranks are in different numbers of groups.
        some = len(ranks) < dist.get_world_size()

        def new(backend: str) -> Any:
            return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=some)

        rank, gpus = dist.get_rank(group), GpuGroups(new)
        with Peers(rank, group).reached():
            inputs, outputs, gradients = (new("gloo") for _ in range(3))
        peers = Peers(rank, outputs, gpus.abort)
        return cls(rank, len(ranks), group, inputs, outputs, gradients, peers, gpus)

    @classmethod
    def of(cls, env: Any) -> ShardingEnv:
        """Return ``env`` itself, or the environment of None (the default group), of a process group, or of
        torchrec's ShardingEnv. All ranks call it. A group's environment is made once, since gloo's groups
        take threads and sockets for every pair of ranks, and made again after a rank has stopped."""
        if isinstance(env, cls):
            return env
        group = getattr(env, "process_group", env)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"env is {env!r}; use None, or ShardingEnv.from_process_group(group)")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        known = cls._known.get(getattr(group, "group_name", ""))
        # torch reuses names of groups
        if known is None or known.process_group is not group or known.peers.stopped:
            known = cls.from_process_group(group)
            cls._known[known.process_group.group_name] = known
        return known

    @property
    def others_first(self) -> list[int]:
        """The other ranks, then this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank] + [self.rank]

    def all_to_all(
        self,
        out: Tensor,
        given: Tensor,
        arriving: Sequence[int],
        leaving: Sequence[int],
        kind: str = VECTORS,
    ) -> Pending:
        """Begin to send ``leaving[r]`` elements of ``given`` to each rank r, and to fill ``out`` with
        ``arriving[r]`` from it; all ranks do. ``kind``: what is sent, ``IDS``, ``VECTORS`` or
        ``GRADIENTS``."""
        if self.world_size == 1:
            out.copy_(given)
            return Pending(self.peers, None)
        self.traffic.bytes_sent += given.element_size() * (sum(leaving) - leaving[self.rank])
        with self.peers.reached():
            awaited = self.peers.begin(kind)
            group = self._group_of(kind, out)
            work = dist.all_to_all_single(
                out, given, list(arriving), list(leaving), group=group, async_op=True
            )
        return Pending(self.peers, work, out, given, awaited=awaited)

    def _group_of(self, kind: str, tensor: Tensor) -> Any:
        if tensor.device.type != "cpu":
            return self.gpus.of("vectors")
        return {IDS: self.inputs, GRADIENTS: self.gradients}.get(kind, self.outputs)

    def gpu_group(self, purpose: str) -> Any:
        """Return the NCCL group for "vectors" or for "dense" gradients. All ranks call it."""
        with self.peers.reached():
            return self.gpus.of(purpose)

    def send_and_receive(self, given: dict[int, Tensor], sizes: dict[int, int]) -> dict[int, Tensor]:
        """Send ``given[r]`` (float32, 1-D) to each rank r and return ``sizes[r]`` floats from it. Ranks
        with nothing to send exchange no message, so only the ranks concerned take part."""
        arrived = {rank: torch.empty(size, dtype=torch.float32, device="cpu") for rank, size in sizes.items()}
        peers = dist.get_process_group_ranks(self.outputs)
        with self.peers.reached():
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
        """Begin to collect a tensor of the same shape from every rank: (ranks, *shape)."""
        everyone = tensor.new_empty((self.world_size, *tensor.shape))
        with self.peers.reached():
            awaited = self.peers.begin(SIZES if group is self.inputs else AGREEMENTS)
            work = dist.all_gather(list(everyone), tensor, group=group or self.outputs, async_op=True)
        return Pending(self.peers, work, tensor, awaited=awaited), everyone

    def gather_objects(self, value: Any, group: Any = None) -> list[Any]:
        """Return the objects of all ranks, by rank. All ranks call it."""
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        pending, sizes = self.gather(torch.tensor(len(pickled), device="cpu"), group)
        pending.wait()
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: len(pickled)] = pickled
        pending, everyone = self.gather(padded, group)
        pending.wait()
        return [
            pickle.loads(of_rank[:size].numpy().tobytes())
            for of_rank, size in zip(everyone, sizes.tolist(), strict=True)
        ]

    def broadcast_objects(self, values: list[Any]) -> None:
        """Replace ``values`` by the values of rank 0. All ranks call it."""
        pickled = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)
        size = torch.tensor(len(pickled), device="cpu")
        self._broadcast(size)
        if self.rank:
            pickled = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._broadcast(pickled)
        if self.rank:
            values[:] = pickle.loads(pickled.numpy().tobytes())

    def _broadcast(self, tensor: Tensor) -> None:
        with self.peers.reached():
            awaited = self.peers.begin(AGREEMENTS)
            source = dist.get_global_rank(self.outputs, 0)
            work = dist.broadcast(tensor, source, group=self.outputs, async_op=True)
        self.peers.wait(work, awaited)

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        """Begin to add up a tensor in host memory over all ranks, in place, as a part of a backward pass."""
        with self.peers.reached():
            awaited = self.peers.begin(GRADIENTS)
            work = dist.all_reduce(tensor, group=group, async_op=True)
        return Pending(self.peers, work, tensor, awaited=awaited)

    def barrier(self) -> None:
        """Wait until all ranks call it. Raises RankError if a rank has stopped."""
        self._wait_for_all(AGREEMENTS)

    def meet(self) -> None:
        """Wait as :meth:`barrier` does, in a forward pass: for use before a collective of torch, which does
        not end where a rank has stopped."""
        self._wait_for_all(VECTORS)

    def _wait_for_all(self, kind: str) -> None:
        with self.peers.reached():
            awaited = self.peers.begin(kind)
            work = dist.barrier(group=self.outputs, async_op=True)
        self.peers.wait(work, awaited)

    def _reduce(self, tensor: Tensor, kind: Any, group: Any) -> None:
        with self.peers.reached():
            awaited = self.peers.begin(AGREEMENTS)
            work = dist.all_reduce(tensor, kind, group=group, async_op=True)
        self.peers.wait(work, awaited)

    def share_error(self, error: Exception | None, kind: type[TierStoreError] = ConfigError) -> None:
        """Raise ``kind`` on every rank if any rank has an error. All ranks call it."""
        failed = torch.tensor([int(error is not None)], device="cpu")
        self._reduce(failed, dist.ReduceOp.MAX, self.outputs)
        if failed.item():
            self.raise_shared(error, self.outputs, kind)

    @contextmanager
    def shared_errors(self, kind: type[TierStoreError] = ConfigError) -> Iterator[None]:
        """Raise ``kind`` on every rank if the block fails on any rank. All ranks enter it."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # the other ranks must not wait
            error = raised
        self.share_error(error, kind)

    @contextmanager
    def shared_errors_or_full(self) -> Iterator[None]:
        """Raise as :meth:`shared_errors`, but StoreFullError if no rank has another kind of error.

        The caller may then give room and try again, for no rank has stopped.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # the other ranks must not wait
            error = raised
        # 0: no error, 1: a full store, 2: another error
        what = 0 if error is None else 1 if isinstance(error, StoreFullError) else 2
        worst = torch.tensor([what], device="cpu")
        self._reduce(worst, dist.ReduceOp.MAX, self.outputs)
        if worst.item():
            try:
                self.raise_shared(error, self.outputs, (StoreFullError, ConfigError)[int(worst.item()) - 1])
            except StoreFullError as full:
                self.peers.handled = full
                raise

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError on every rank unless all ranks give values of equal ``repr``.

        All ranks call it.
        """
        digests = b"".join(hashlib.sha256(repr(value).encode()).digest() for value in values.values())
        pending, everyone = self.gather(torch.frombuffer(bytearray(digests), dtype=torch.uint8))
        pending.wait()
        different = (everyone != everyone[0]).view(self.world_size, len(values), -1).any(dim=2)
        for rank, differs in enumerate(different.tolist()):
            if any(differs):
                what = ", ".join(name for name, other in zip(values, differs, strict=True) if other)
                raise ConfigError(f"rank {rank} was given other {what} than rank 0; give all ranks the same")

    def raise_shared(self, error: Exception | None, group: Any, kind: type[TierStoreError]) -> NoReturn:
        """Raise ``kind`` on every rank, with the messages of all ranks that have an error.

        Where all errors are of one kind of :data:`_SHARED`, that says what is raised.
        """
        own = None if error is None else (str(error) or type(error).__name__, _shared_kind(error))
        found: list[Any] = self.gather_objects(own, group)
        ranks: dict[str, list[str]] = {}
        for rank, of_rank in enumerate(found):
            if of_rank is not None:
                ranks.setdefault(of_rank[0], []).append(str(rank))
        kinds = {of_rank[1] for of_rank in found if of_rank is not None}
        shared = kinds.pop() if len(kinds) == 1 else None
        kind = shared or kind
        if len(found) in map(len, ranks.values()) and shared is not RankError:
            raise kind(next(iter(ranks))) from error
        texts = (f"rank {', '.join(failed)}: {text}" for text, failed in ranks.items())
        raise kind("; ".join(texts)) from error

    def min_over_ranks(self, value: int) -> int:
        """Return the smallest ``value`` of any rank. All ranks call it."""
        smallest = torch.tensor([value], device="cpu")
        self._reduce(smallest, dist.ReduceOp.MIN, self.inputs)
        return int(smallest.item())

    def total(self, values: Sequence[float]) -> list[float]:
        """Return each of ``values`` summed over the ranks, in float64. All ranks call it."""
        sums = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._reduce(sums, dist.ReduceOp.SUM, self.outputs)
        return [float(value) for value in sums]

    def sum_bits(self, tensor: Tensor) -> Tensor:
        """Add up a float32 tensor of which every element is non-zero bits on at most one rank; in place.

        Exact: the bits are added as integers."""
        self._reduce(tensor.view(torch.int32), dist.ReduceOp.SUM, self.outputs)
        return tensor


_SHARED = {GpuError: GpuError, DeviceFullError: RankError}
"""What all ranks raise for an error that a rank has with its GPU."""


def _shared_kind(error: Exception) -> type[TierStoreError] | None:
    return next((shared for kind, shared in _SHARED.items() if isinstance(error, kind)), None)


def _timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a group, which new groups do not inherit; None if the group has no CPU
    backend."""
    try:
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return None
    return found
