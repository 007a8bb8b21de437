"""Runs a function on several ranks: processes of this machine that live as long as the tests."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=20)
"""For every collective."""
_LONGEST_S = 240
_context = multiprocessing.get_context("forkserver")
# once, in the process that forks the ranks
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchrec"),
        *("tierstore.sharding", "tests.sharding.cases", "tests.sharding.warm"),
    ]
)
_ranks: list[Rank] = []


class Rank:
    def __init__(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> str | None:
        try:
            answer: str | None = self.pipe.recv()
        except EOFError:
            return "it died"
        return answer


def run(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """``function(*args)`` on ranks of a new process group; raises AssertionError with what ranks raise."""
    while len(_ranks) < world_size:
        _ranks.append(Rank())
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        for rank in range(world_size):
            _ranks[rank].pipe.send((rank, world_size, store, function, args))
        failures = _failures({_ranks[rank].pipe: rank for rank in range(world_size)})
    if failures:
        _end_all()  # what they were doing is not known
        raise AssertionError("\n".join(failures))


def _failures(waiting: dict[Connection, int]) -> list[str]:
    failures: list[str] = []
    while waiting:
        ready = wait(list(waiting), timeout=2 if failures else _LONGEST_S)
        if not ready:
            return [*failures, f"ranks {sorted(waiting.values())} did not answer"]
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            answer = _ranks[rank].answer()
            if answer is not None:
                failures.append(f"rank {rank}: {answer}")
    return failures


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else every collection below would search all that the fork has imported
    while True:
        try:
            rank, world_size, store, function, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT
            )
            function(*args)
            dist.barrier()
            dist.destroy_process_group()
            # Groups of modules in cycles live on, and the threads of each wake up a hundred times per second.
            gc.collect()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


@atexit.register
def _end_all() -> None:
    while _ranks:
        rank = _ranks.pop()
        rank.process.kill()
        rank.process.join()
