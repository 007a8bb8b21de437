"""One rank of ``tierstore bench sharding``: the same steps by tierstore and torchrec, in turns."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig, optim
from tierstore.errors import ConfigError
from tierstore.sharding import (
    CommsConfig,
    ShardingEnv,
    column_wise,
    construct_plan,
    row_wise,
    shard,
    table_wise,
)
from tierstore.sharding.table_sharding import TableSharding

from ._torchrec import as_theirs, sharded_by_torchrec

LR = 0.1
_DRAWN = 4
"""Different batches; steps use them in turns."""


@dataclass(frozen=True)
class Setting:
    """One measurement. ``cut``: table_wise (tables dealt to the ranks in turns), row_wise or column_wise."""

    cut: str
    tables: int
    rows: int
    dim: int
    batch_size: int
    pooling: int
    steps: int
    torchrec: bool
    comms: CommsConfig

    def configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(self.rows, self.dim, f"t{i}", feature_names=[f"f{i}"])
            for i in range(self.tables)
        ]

    def cuts(self, world: int) -> dict[str, TableSharding]:
        kinds: dict[str, Callable[[int], TableSharding]] = {
            "table_wise": lambda i: table_wise(i % world),
            "row_wise": lambda _: row_wise(),
            "column_wise": lambda _: column_wise(list(range(world))),
        }
        return {f"t{i}": kinds[self.cut](i) for i in range(self.tables)}


def measure(setting: Setting) -> dict[str, Any]:
    """Measure ``seconds``, ``cpu_seconds`` and ``bytes_sent``.

    ``seconds`` are of each step and the slowest rank, by system. ``cpu_seconds`` are of all threads of all
    ranks. ``bytes_sent`` are what tierstore's rank 0 sends to other ranks in the last step.
    """
    torch.set_num_threads(1)
    tierstore.set_num_threads(1)
    env = ShardingEnv.from_process_group()
    whole = tierstore.EmbeddingBagCollection(
        setting.configs(), config=TierConfig(hbm="all"), optimizer=optim.SGD(lr=LR)
    )
    plan = construct_plan(whole, setting.cuts(env.world_size), env.world_size)
    ours = shard(whole, plan, env, comms=setting.comms)
    steps: dict[str, Callable[[KeyedJaggedTensor], None]] = {"tierstore": lambda batch: _step(ours(batch))}
    if setting.torchrec:
        steps["torchrec"] = _torchrec_step(setting, env.world_size)
    batches = [_batch(setting, env.rank, number) for number in range(_DRAWN)]
    times: dict[str, list[float]] = {name: [] for name in steps}
    cpu_times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(setting.steps + 2):
        for name, step in steps.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            sent = env.traffic.bytes_sent
            step(batches[number % _DRAWN])
            taken = torch.tensor([time.perf_counter() - start])
            worked = torch.tensor([time.process_time() - cpu])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            dist.all_reduce(worked, dist.ReduceOp.SUM)
            if number >= 2:  # before, rows are made and buffers grow
                times[name].append(float(taken))
                cpu_times[name].append(float(worked))
            if name == "tierstore":
                bytes_sent = env.traffic.bytes_sent - sent
    ours.close()
    return {"seconds": times, "cpu_seconds": cpu_times, "bytes_sent": bytes_sent}


def _step(pooled: Any) -> None:
    (pooled.values() * 0.01).sum().backward()


def _batch(setting: Setting, rank: int, number: int) -> KeyedJaggedTensor:
    drawn = torch.Generator().manual_seed(1000 * number + rank)
    bags = setting.tables * setting.batch_size
    lengths = torch.full((bags,), setting.pooling)
    ids = torch.randint(0, setting.rows, (bags * setting.pooling,), generator=drawn)
    return KeyedJaggedTensor([f"f{i}" for i in range(setting.tables)], ids, lengths=lengths)


def _torchrec_step(setting: Setting, world: int) -> Callable[[KeyedJaggedTensor], None]:
    warnings.simplefilter("ignore")

    def cuts(plans: Any) -> dict[str, Any]:
        kinds: dict[str, Callable[[int], Any]] = {
            "table_wise": lambda i: plans.table_wise(rank=i % world),
            "row_wise": lambda _: plans.row_wise(),
            "column_wise": lambda _: plans.column_wise(ranks=list(range(world))),
        }
        return {f"t{i}": kinds[setting.cut](i) for i in range(setting.tables)}

    try:
        model = sharded_by_torchrec(setting.configs(), cuts, LR)
    except ConfigError as error:
        raise ConfigError(f"{error}; use --no-torchrec") from error
    return lambda batch: _step(model(as_theirs(batch)).wait())
