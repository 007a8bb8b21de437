"""Take a torchrec model that exists, move its tables to tiers, and train on.

    python examples/offload_torchrec.py

The model is torchrec's own DLRM with tables in memory. `tierstore.offload` replaces its collection; weights
and all other code stay. `--in-memory` trains the same without `offload`: the losses are the same.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.random import RandomRecDataset
from torchrec.models.dlrm import DLRM, DLRMTrain

import tierstore

NAMES = [f"cat_{number}" for number in range(6)]


def built(rows: int) -> DLRMTrain:
    """Return a model as a script of torchrec builds it."""
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=16, num_embeddings=rows, feature_names=[name])
        for name in NAMES
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    return DLRMTrain(DLRM(bags, 4, dense_arch_layer_sizes=[16, 16], over_arch_layer_sizes=[32, 1]))


def main() -> None:
    args = arguments()
    model = built(args.rows)
    if args.in_memory:
        tables: torch.optim.Optimizer | None = torch.optim.SGD(model.model.sparse_arch.parameters(), lr=0.1)
        tiers = nullcontext()
    else:
        config = tierstore.TierConfig(hbm=args.hbm, ssd="1GiB")
        tables = None  # the rows' optimizer runs in the backward pass
        tiers = tierstore.offload(model, config, tierstore.optim.SGD(lr=0.1))
    names = {name for name, _ in model.named_parameters() if "sparse_arch" not in name}
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if name in names], lr=0.1)

    data = RandomRecDataset(
        NAMES,
        args.batch_size,
        hash_size=args.rows,
        ids_per_feature=4,
        num_dense=4,
        num_batches=args.steps,
        manual_seed=2,
    )
    with tiers:
        for step, batch in enumerate(data, start=1):
            loss, _ = model(batch)
            for optimizer in filter(None, (dense, tables)):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in filter(None, (dense, tables)):
                optimizer.step()
            if step % 10 == 0 or step == args.steps:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
        if not args.in_memory:
            (bags,) = tiers.values()
            hbm = bags.stats()["tiers"]["hbm"]
            print(f"{hbm['rows'] - hbm['row_hits']} of {hbm['rows']} rows came from the lower tiers")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=20_000, help="of each of the 6 tables")
    parser.add_argument("--hbm", default="1MiB", help="budget of the fast tier (default: 1MiB)")
    parser.add_argument("--in-memory", action="store_true", help="leave the tables as they are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
