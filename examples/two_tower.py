"""Train a two-tower model for retrieval, both towers over tables in tiers, and measure recall and NDCG.

    python examples/two_tower.py
    python examples/two_tower.py --hbm all      (everything in memory: the same figures)

One tower makes a vector of a user and the items that the user saw, the other of an item; the towers'
perceptrons are torchrec's. The loss is a softmax over the items of the batch. The data are generated: users
and items have hidden tastes, and users pick items of their taste.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.mlp import MLP

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor
from tierstore.integrations.torchmetrics import retrieval_metrics

DIM, SEEN, TASTES = 16, 5, 20
Pairs = tuple[KeyedJaggedTensor, KeyedJaggedTensor]
"""Users with the items that they saw, and the item that each picked next."""


@dataclass(frozen=True)
class Picks:
    """Which items users pick: a taste has every TASTES-th user and item, and a few popular items."""

    users: int
    items: int

    def batch(self, seed: int, size: int) -> Pairs:
        """Return ``size`` pairs: a pure function of the seed."""
        random = torch.Generator().manual_seed(seed)
        user = (self.users * torch.rand(size, generator=random) ** 2).long()
        of_taste = self.items // TASTES
        popular = (of_taste * torch.rand(size, SEEN + 1, generator=random) ** 3).long()
        chosen = popular * TASTES + (user % TASTES).unsqueeze(1)
        seen, picked = chosen[:, :SEEN].reshape(-1), chosen[:, SEEN]
        lengths = torch.cat([torch.ones(size, dtype=torch.int64), torch.full((size,), SEEN)])
        query = KeyedJaggedTensor.from_lengths_sync(["user", "seen"], torch.cat([user, seen]), lengths)
        return query, item_batch(picked)

    def batches(self, first: int, size: int) -> Iterator[Pairs]:
        while True:
            yield self.batch(first, size)
            first += 1


def item_batch(items: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["item"], items, torch.ones_like(items))


class TwoTower(nn.Module):
    """Scores of users and items are the inner products of their towers' vectors."""

    def __init__(self, picks: Picks, config: tierstore.TierConfig) -> None:
        super().__init__()
        optimizer = tierstore.optim.RowWiseAdagrad(lr=0.1)
        asking = [
            EmbeddingBagConfig(picks.users, DIM, "users", feature_names=["user"]),
            EmbeddingBagConfig(picks.items, DIM, "seen_items", feature_names=["seen"]),
        ]
        offered = [EmbeddingBagConfig(picks.items, DIM, "items", feature_names=["item"])]
        self.query_bags = tierstore.EmbeddingBagCollection(asking, config=config, optimizer=optimizer)
        self.item_bags = tierstore.EmbeddingBagCollection(offered, config=config, optimizer=optimizer)
        torch.manual_seed(1)
        self.query_tower = MLP(2 * DIM, [32, DIM], activation_on_last=False)
        self.item_tower = MLP(DIM, [32, DIM], activation_on_last=False)

    def queries(self, users: KeyedJaggedTensor) -> torch.Tensor:
        """Return vectors (users, DIM)."""
        return self.query_tower(self.query_bags(users).values())

    def items(self, items: KeyedJaggedTensor) -> torch.Tensor:
        """Return vectors (items, DIM)."""
        return self.item_tower(self.item_bags(items).values())

    def forward(self, pairs: Pairs) -> torch.Tensor:
        scores = self.queries(pairs[0]) @ self.items(pairs[1]).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    def close(self) -> None:
        self.query_bags.close()
        self.item_bags.close()


def train(picks: Picks, config: tierstore.TierConfig, batch_size: int, steps: int) -> TwoTower:
    model = TwoTower(picks, config)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.002)  # tables have optimizers of their own
    batches = tierstore.prefetch(picks.batches(0, batch_size), model)
    for step in range(1, steps + 1):
        loss = model(next(batches))
        dense_optimizer.zero_grad()
        loss.backward()  # updates the rows of both towers, too
        dense_optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}  loss {loss.item():.6f}", flush=True)
    batches.close()
    return model


@torch.no_grad()
def evaluate(model: TwoTower, picks: Picks, queries: int = 200, offered: int = 500) -> dict[str, float]:
    """Return the metrics of finding the picked item among those that are offered."""
    model.eval()
    users, picked = picks.batch(2**32, queries)  # a seed that training does not reach
    random = torch.Generator().manual_seed(7)
    others = torch.randint(picks.items, (offered,), generator=random)
    items = torch.cat([picked.values(), others]).unique()
    scores = model.queries(users) @ model.items(item_batch(items)).T
    relevant = items == picked.values().unsqueeze(1)
    metrics = retrieval_metrics(k=10)
    metrics.update(scores, relevant, indexes=torch.arange(queries).unsqueeze(1).expand_as(scores))
    return {name: value.item() for name, value in metrics.compute().items()}


def main() -> None:
    args = arguments()
    picks = Picks(users=args.users, items=args.items)
    config = tierstore.TierConfig(hbm=args.hbm, ssd=0 if args.hbm == "all" else "4GiB")
    model = train(picks, config, args.batch_size, args.steps)
    for name, value in sorted(evaluate(model, picks).items()):
        print(f"{name:20} {value:.4f}")
    model.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--users", type=int, default=200_000)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--hbm", default="1MiB", help='budget of each fast tier, or "all" (default: 1MiB)')
    return parser.parse_args()


if __name__ == "__main__":
    main()
