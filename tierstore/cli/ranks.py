"""The ranks on which torchrun started a command: what they share, and which of them prints.

Rank 0 prints for all. An error that all ranks have is printed once: a rank that fails waits until rank 0 has
printed, since torchrun ends all ranks when the first one ends, and prints itself only where rank 0 cannot.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.cli.messages import say
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.data import Batch
    from tierstore.sharding.env import ShardingEnv

COMMAND = "torchrun --standalone --nproc-per-node N -m tierstore.cli train --plan plan.json"

_PRINTED = "tierstore: printed by rank"
_PATIENCE_S = 3.0
"""Seconds that a rank gives rank 0 to print an error."""
_EARLY_PATIENCE_S = 20.0
"""The same before the ranks have found one another: rank 0 may still be importing."""
_stores: list[Any] = []


def number_of_ranks() -> int:
    """Return how many ranks torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1


def own_rank() -> int:
    """Return this process's rank; 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a job. All ranks call every method, at the same point."""

    rank: int = 0
    size: int = 1
    env: ShardingEnv | None = None
    """None: the process is alone, and its tables are not sharded."""

    @property
    def prints(self) -> bool:
        """Whether this rank prints and writes the result files."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.env is not None

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise an error of the block on every rank, if it fails on any rank."""
        if self.env is None:
            yield
            return
        with self.env.shared_errors():
            yield

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Raise RankError where an exchange of the dense part fails, since another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.env is None or "gloo" not in str(error):
                raise
            with self.env.peers.reached():
                raise

    def on_rank_0(self, work: Callable[[], None]) -> None:
        """Call ``work`` on rank 0, and raise its error on every rank."""
        from tierstore.checkpoint.ranks import on_rank_0

        if self.env is None:
            work()
        else:
            on_rank_0(self.env, work)

    def total(self, *values: float) -> Sequence[float]:
        """Return each value summed over the ranks."""
        return values if self.env is None else self.env.total(values)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        return [value] if self.env is None else self.env.gather_objects(value)

    def part_of(self, batch: Batch) -> Batch:
        """Return this rank's examples of a batch."""
        from tierstore.data.parts import part_of

        return batch if self.env is None else part_of(batch, self.rank, self.size)


ALONE = Ranks()


def join(ranks: int) -> Ranks:
    """Join the ranks that torchrun started, for a plan of ``ranks`` ranks.

    Raises ConfigError, on every rank, for another number of ranks than the plan has.
    """
    there = number_of_ranks()
    if there != ranks:
        raise ConfigError(
            f"the plan is for {ranks} ranks and there {'is 1' if there == 1 else f'are {there}'}; start "
            f"as many by {COMMAND.replace(' N ', f' {ranks} ')}, or plan again for {there}"
        )
    import torch.distributed as dist

    from tierstore.sharding.env import ShardingEnv

    if own_rank():
        logging.getLogger("tierstore").setLevel(logging.ERROR)  # rank 0 warns for all
    if there == 1 and "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return Ranks(0, 1, ShardingEnv.from_process_group())
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] and "lo" in os.listdir(
        "/sys/class/net"
    ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no rank is on another machine
    store, rank, size = next(dist.rendezvous("env://"))
    _stores.append(dist.PrefixStore("tierstore-cli", store))
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=size)
    return Ranks(rank, size, ShardingEnv.from_process_group())


def leave(ranks: Ranks) -> None:
    """End the process group in good order."""
    if ranks.sharded:
        import torch.distributed as dist

        _stores.clear()
        dist.destroy_process_group()


def complain(text: str) -> None:
    """Print ``text`` on stderr, once for all ranks that call this with an error of their own or of all."""
    if own_rank() == 0:
        say(text)
        with suppress(Exception):
            _stores[0].set(_PRINTED, "0")
    elif not _stores:  # torchrun ends this rank once rank 0 has failed, too
        time.sleep(_EARLY_PATIENCE_S)
        say(f"rank {own_rank()}: {text}")
    elif not _printed_by_rank_0():
        say(f"rank {own_rank()}: {text}")


def _printed_by_rank_0() -> bool:
    """Wait for rank 0 to print; return whether it, or another rank in its place, did."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends a rank whose peer has died
    end = time.monotonic() + _PATIENCE_S
    with suppress(Exception):  # rank 0 may have had the store
        while time.monotonic() < end:
            if _stores[0].check([_PRINTED]):
                return True
            time.sleep(0.05)
        own = str(own_rank())
        return bool(_stores[0].compare_set(_PRINTED, "", own).decode() != own)
    return False
