"""Train torchrec's DeepFM over tables in tiers, and judge it by the metrics of click prediction.

    python examples/deepfm.py
    python examples/deepfm.py --hbm all      (everything in memory: the same figures)

The model is torchrec's SimpleDeepFMNN; the collection that it gets is tierstore's. The data are generated,
with labels that can be learned. The ids of the first table stand for users, whose AUCs GAUC is the mean of.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN

import tierstore
from tierstore import EmbeddingBagConfig
from tierstore.data import Batch, Dataset, load
from tierstore.integrations.torchmetrics import click_metrics


class Trained(nn.Module):
    """DeepFM with its loss. The forward pass returns the loss and the probabilities of clicks."""

    def __init__(self, data: Dataset, config: tierstore.TierConfig) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(table.num_embeddings, 16, table.name) for table in data.tables]
        optimizer = tierstore.optim.RowWiseAdagrad(lr=0.1)
        self.bags = tierstore.EmbeddingBagCollection(tables, config=config, optimizer=optimizer)
        torch.manual_seed(1)
        self.deepfm = SimpleDeepFMNN(data.dense_dim, self.bags, hidden_layer_size=32, deep_fm_dimension=16)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        clicks = self.deepfm(batch.dense, batch.sparse).squeeze(1)
        return nn.functional.binary_cross_entropy(clicks, batch.labels), clicks


def train(data: Dataset, config: tierstore.TierConfig, batch_size: int, steps: int) -> Trained:
    model = Trained(data, config)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.002)  # tables have an optimizer of their own
    batches = tierstore.prefetch(data.train(batch_size), model)
    for step, batch in enumerate(islice(batches, steps), start=1):
        loss, _ = model(batch)
        dense_optimizer.zero_grad()
        loss.backward()  # updates the rows, too
        dense_optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}  loss {loss.item():.6f}", flush=True)
    batches.close()
    return model


@torch.no_grad()
def evaluate(model: Trained, data: Dataset, batch_size: int, batches: int = 8) -> dict[str, float]:
    """Return the metrics over examples that training has not seen. Reading rows changes none of them."""
    model.eval()
    metrics = click_metrics(groups=True)
    for batch in islice(data.test(batch_size), batches):
        _, clicks = model(batch)
        user = batch.sparse[data.tables[0].name].values()  # one id per example
        metrics.update(clicks, batch.labels.long(), indexes=user)
    return {name: value.item() for name, value in metrics.compute().items()}


def main() -> None:
    args = arguments()
    data = load("synthetic:zipf:1.05", tables=6, rows=args.rows)
    config = tierstore.TierConfig(hbm=args.hbm, ssd=0 if args.hbm == "all" else "4GiB")
    model = train(data, config, args.batch_size, args.steps)
    for name, value in sorted(evaluate(model, data, args.batch_size).items()):
        print(f"{name:20} {value:.4f}")
    model.bags.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=200_000, help="of each of the 6 tables")
    parser.add_argument("--hbm", default="6MiB", help='budget of the fast tier, or "all" (default: 6MiB)')
    return parser.parse_args()


if __name__ == "__main__":
    main()
