"""Runs a function on several ranks in processes of this machine, with a time limit on every collective."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=20)
# imported once, by the process that forks the ranks
multiprocessing.set_forkserver_preload(
    ["torch", "cache_policies", "tierstore.sharding", "tests.sharding.cases"]
)


def run(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """``function(*args)`` on every rank; raises what a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, str(Path(folder, "store")), function, args)
        mp.start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")


def _rank(
    rank: int, world_size: int, store: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        function(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
