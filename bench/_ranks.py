"""Ranks of a job on this machine, each a new process."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_TIMEOUT = timedelta(seconds=120)


def on_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``work(*arguments)`` on all ranks of a gloo group; return what rank 0 returns (as JSON keeps it).

    Processes are forks of a process that has imported torch, so that hundreds may be begun.
    """
    import torch.multiprocessing as mp

    multiprocessing.set_forkserver_preload(["torch", "tierstore.sharding"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (world_size, folder, work, arguments), nprocs=world_size, start_method="forkserver"
        )
        return json.loads(Path(folder, "result.json").read_text())


def _rank(
    rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    try:
        result = work(*arguments)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
