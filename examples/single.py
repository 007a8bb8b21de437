"""Train a DLRM in one process, its tables in tiers. Run it again to go on where the last run was saved.

    python examples/single.py --steps 200
    python examples/single.py --steps 400      (goes on at step 200)

The data are generated: 8 tables of a million rows, ids by popularity, labels that can be learned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import tierstore
from tierstore import EmbeddingBagConfig, checkpoint
from tierstore.data import load
from tierstore.models import AUC, DLRM, DLRMTrain


def main() -> None:
    args = arguments()
    data = load("synthetic:zipf:1.05", tables=8, rows=args.rows)
    args.folder.mkdir(exist_ok=True)

    # The budget holds a thirtieth of the rows. The others are on the SSD, below `path`.
    config = tierstore.TierConfig(hbm=args.hbm, ssd="20GiB", path=args.folder / "rows")
    tables = [EmbeddingBagConfig(table.num_embeddings, 16, table.name) for table in data.tables]
    bags = tierstore.EmbeddingBagCollection(
        tables, config=config, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.05)
    )
    torch.manual_seed(1)
    model = DLRMTrain(DLRM(bags, data.dense_dim, [32, 16], [32, 1]))
    dense_optimizer = torch.optim.Adagrad(
        model.parameters(), lr=0.02
    )  # tables have an optimizer of their own

    # Prefetching fetches the rows of coming batches while the current one computes.
    batches = tierstore.prefetch(data.train(args.batch_size), model)
    saved = checkpoint.restore(args.folder / "checkpoints", model, dense_optimizer, loader=batches)
    step = 0 if saved is None else saved.step
    auc = AUC()
    while step < args.steps:
        loss, (_, logits, labels) = model(next(batches))
        dense_optimizer.zero_grad()
        loss.backward()  # updates the rows, too
        dense_optimizer.step()
        auc.update(labels, logits)
        step += 1
        if step % 100 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.6f}  AUC of this run {auc.value():.4f}", flush=True)
            checkpoint.save(args.folder / "checkpoints", model, dense_optimizer, step=step, loader=batches)
    batches.close()

    hbm = bags.stats()["tiers"]["hbm"]
    print(f"{hbm['row_hits'] / hbm['rows']:.0%} of the rows of a batch were in hbm before it")
    bags.close(commit=False)  # the last checkpoint has everything


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="step to train to (default: 200)")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=10**6, help="of each of the 8 tables")
    parser.add_argument("--hbm", default="20MiB", help="budget of the fast tier (default: 20MiB)")
    parser.add_argument("--folder", type=Path, default=Path("single-run"), help="of rows and checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
