"""Runs a function on several ranks: processes of this machine that live as long as the tests, with a limit on
the time of every collective."""

from __future__ import annotations

import atexit
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
_LONGEST_S = 120
_context = multiprocessing.get_context("forkserver")
# imported once, by the process that forks the ranks
_context.set_forkserver_preload(["torch", "cache_policies", "tierstore.sharding", "tests.sharding.cases"])
_groups: dict[int, Ranks] = {}


def run(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """``function(*args)`` on every rank; raises what a rank raises. They are those of earlier calls, unless
    one of these failed."""
    if world_size not in _groups:
        _groups[world_size] = Ranks(world_size)
    try:
        _groups[world_size].run(function, args)
    except BaseException:
        _groups.pop(world_size).end()
        raise


class Ranks:
    """Processes with one process group."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            store = str(Path(self._folder.name, "store"))
            process = _context.Process(target=_serve, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        for pipe in self._pipes:
            pipe.send((function, args))
        waiting, failures = list(self._pipes), []
        while waiting:
            ready = wait(waiting, timeout=2 if failures else _LONGEST_S)
            if not ready:
                failures.append("a rank did not answer")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                waiting.remove(pipe)
                answer = _answer(pipe)
                if answer is not None:
                    failures.append(f"rank {self._pipes.index(pipe)}: {answer}")
        if failures:
            raise AssertionError("\n".join(failures))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _answer(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return "it died"


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            function(*args)
            dist.barrier()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


@atexit.register
def _end_all() -> None:
    while _groups:
        _groups.popitem()[1].end()
