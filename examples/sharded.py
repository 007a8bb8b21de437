"""Train a DLRM whose tables are cut over several ranks, each with tiers of its own.

    torchrun --nproc-per-node 2 examples/sharded.py --steps 100

No plan is given, so the planner makes one for the budgets. Run it again, with more steps or after a rank
died: all ranks go on from the last checkpoint, which is one unit of rows and dense parameters.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import tierstore
from tierstore import EmbeddingBagConfig, checkpoint
from tierstore.data import load
from tierstore.models import DLRM, DLRMTrain
from tierstore.sharding import DistributedModelParallel


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    args.folder.mkdir(exist_ok=True)
    data = load("synthetic:zipf:1.05", tables=4, rows=args.rows)

    tables = [EmbeddingBagConfig(table.num_embeddings, 16, table.name) for table in data.tables]
    optimizer = tierstore.optim.RowWiseAdagrad(lr=0.05)
    # On the meta device the collection has no rows: the ranks make them.
    bags = tierstore.EmbeddingBagCollection(tables, device="meta", optimizer=optimizer)
    torch.manual_seed(1)  # dense parameters begin alike on all ranks
    model = DLRMTrain(DLRM(bags, data.dense_dim, [32, 16], [32, 1]))
    config = tierstore.TierConfig(
        hbm=args.hbm, uvm=args.hbm, ssd="4GiB", path=args.folder / "rows"
    )  # of a rank
    model = DistributedModelParallel(model, config=config, batch_size=args.batch_size)
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if rank == 0:
        for table in model.plan.tables:
            print(f"{table.name}: {table.sharding_type}, ranks {[shard.rank for shard in table.shards]}")

    # Each rank trains on every `ranks`-th batch. Rows are fetched ahead on all ranks.
    own = islice(data.train(args.batch_size), rank, None, ranks)
    batches = tierstore.prefetch(own, model)
    saved = checkpoint.restore(args.folder / "checkpoints", model, dense_optimizer, loader=batches)
    step = 0 if saved is None else saved.step
    while step < args.steps:
        loss, _ = model(next(batches))
        dense_optimizer.zero_grad()
        loss.backward()  # updates the rows on the ranks that hold them
        dense_optimizer.step()
        step += 1
        if step % 50 == 0 or step == args.steps:
            if rank == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
            checkpoint.save(args.folder / "checkpoints", model, dense_optimizer, step=step, loader=batches)
    batches.close()
    model.close(commit=False)  # the last checkpoint has everything
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=256, help="examples of a rank (default: 256)")
    parser.add_argument("--rows", type=int, default=10**6, help="of each of the 4 tables")
    parser.add_argument("--hbm", default="8MiB", help="budget of a rank's fast tier, and of uvm")
    parser.add_argument("--folder", type=Path, default=Path("sharded-run"), help="of rows and checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
