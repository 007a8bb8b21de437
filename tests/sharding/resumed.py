"""What torchrun runs in test_lost_ranks: trains to the end from wherever the last commit is.

In its first life rank 1 is killed when its own store has committed and the commit of all is not made yet.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tests.sharding import cases
from tierstore import KeyedJaggedTensor, TierConfig, optim
from tierstore.sharding import (
    DistributedModelParallel,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    table_wise,
)

CUTS = {"t0": row_wise([13, 37]), "t1": column_wise([1, 0]), "t2": data_parallel(), "t3": table_wise(1)}

STEPS = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = tierstore.EmbeddingBagCollection(
            cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05)
        )
        self.over = nn.Linear(36, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse(features).values())


def train(folder: Path, kill: bool) -> None:
    """Leaves the end in ``end.pt``; rank 1 kills itself if ``kill``."""
    rank = dist.get_rank()
    model = Model()
    plan = construct_plan(model.sparse, CUTS, 2, name="sparse")
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=str(folder / "tables"))
    dmp = DistributedModelParallel(model, plan=plan, config=tiers)
    done = dmp.committed_extra().get("step", 0)
    if done:
        model.over.load_state_dict(torch.load(folder / f"dense{done}.pt"))
    optimizer = torch.optim.SGD(dmp.parameters(), lr=0.1)
    for step, batch in enumerate(cases.batches(2, STEPS, longest=1)):
        if step < done:
            continue
        optimizer.zero_grad()
        dmp(batch.of([rank])).square().sum().backward()
        optimizer.step()
        if kill and rank == 1 and step == 2:
            dmp.sharded["sparse"].engine.commit({"commit": 99})
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            torch.save(model.over.state_dict(), folder / f"dense{step + 1}.pt")
        dmp.commit({"step": step + 1})
    state = {"begun_at": done, "model": dmp.state_dict()}
    for table in cases.tables():
        state[table.name] = model.sparse.optimizer_rows(torch.arange(table.num_embeddings), table.name)
    if rank == 0:
        torch.save(state, folder / "end.pt")
    dmp.close(commit=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), kill=os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    dist.destroy_process_group()
