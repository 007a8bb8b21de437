"""A small training, as a plain loop and as parts that frameworks train."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import tierstore

IDS, BATCH, STEPS = 10**6, 16, 12


class Model(nn.Module):
    """A table that does not fit its budget, dropout that draws random numbers, and a layer."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        config = tierstore.TierConfig(hbm="16KiB", ssd="1GiB", path=path)
        adam = tierstore.optim.Adam(lr=0.05)
        self.bag = tierstore.TieredEmbeddingBag(IDS, 8, config=config, optimizer=adam, seed=1)
        torch.manual_seed(1)
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.bag(ids)).square().mean()


def dense_optimizer(model: Model) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.top.parameters(), lr=0.01)


def loader(steps: int = STEPS) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(3000, (BATCH * steps, 4), generator=generator)
    return torch.utils.data.DataLoader(data, BATCH, shuffle=True, generator=generator)


def result(model: Model) -> dict[str, Tensor]:
    """All that was trained: dense weights, all rows that may have been used, and their optimizer state."""
    ids = torch.arange(3000)
    return {
        **{name: value.clone() for name, value in model.top.state_dict().items()},
        "rows": model.bag.rows(ids),
        **model.bag.optimizer_rows(ids),
    }


def plain_loop(path: Path, epochs: int = 1) -> dict[str, Tensor]:
    model = Model(path)
    optimizer, batches = dense_optimizer(model), loader()
    torch.manual_seed(3)
    for _ in range(epochs):
        for ids in batches:
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
    found = result(model)
    model.bag.close()
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
