"""Who takes part: the ranks of a job, and the process groups that sharded collections talk over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.errors import ConfigError, TierStoreError


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

    @classmethod
    def from_process_group(cls, group: Any = None, timeout: timedelta | None = None) -> ShardingEnv:
        """``group``: the ranks that share the tables, the default group if None. ``timeout``: after which a
        collective that some rank does not join fails on the others; torch's default if None."""
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; start the ranks with torchrun and call "
                'torch.distributed.init_process_group("gloo") first'
            )
        group = dist.group.WORLD if group is None else group
        ranks = dist.get_process_group_ranks(group)

        def new() -> Any:
            return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)

        return cls(dist.get_rank(group), len(ranks), group, new(), new())

    @property
    def others_first(self) -> list[int]:
        """The other ranks, then this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank] + [self.rank]

    def agree(self, error: Exception | None, kind: type[TierStoreError] = ConfigError) -> None:
        """Raises ``kind`` on every rank if any rank has an error. All ranks call it."""
        failed = torch.tensor([int(error is not None)])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.outputs)
        if failed.item():
            self.raise_together(error, self.outputs, kind)

    def raise_together(self, error: Exception | None, group: Any, kind: type[TierStoreError]) -> NoReturn:
        """Raises ``kind`` on every rank, with what all ranks that have an error say."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, None if error is None else str(error), group=group)
        raise kind(
            "; ".join(f"rank {r}: {text}" for r, text in enumerate(found) if text is not None)
        ) from error

    def least(self, value: int) -> int:
        """The smallest ``value`` of any rank. All ranks call it."""
        smallest = torch.tensor([value])
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.inputs)
        return int(smallest.item())

    def sum_bits(self, tensor: Tensor) -> Tensor:
        """Adds up a float32 tensor of which every element is non-zero bits on at most one rank; in place.

        Exact: the bits are added as integers."""
        dist.all_reduce(tensor.view(torch.int32), group=self.outputs)
        return tensor
