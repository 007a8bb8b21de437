"""A small training with everything around it that a checkpoint has to keep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tierstore
from tierstore import TierConfig, checkpoint, optim

ROWS, DIM = 400, 8


class Model(nn.Module):
    """Two tiered modules in places of their own, dropout, a buffer that training changes."""

    def __init__(self, folder: Path, engine: str = "native", stores: int = 1, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.lower = nn.ModuleDict({"bag": self._bag(folder / "a", engine, "left", seed)})
        if stores == 2:
            self.second = self._bag(folder / "b", engine if engine != "lmdb" else "native", "right", seed)
        self.norm = nn.BatchNorm1d(DIM)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(DIM, 1))

    @staticmethod
    def _bag(path: Path, engine: str, name: str, seed: int) -> Any:
        path.parent.mkdir(parents=True, exist_ok=True)
        config = TierConfig(hbm="24KiB", uvm="8KiB", ssd="256MiB", path=path, engine=engine)
        return tierstore.TieredEmbeddingBag(
            ROWS, DIM, config=config, optimizer=optim.Adam(lr=0.05), seed=seed, name=name
        )

    def bags(self) -> list[Any]:
        return [self.lower["bag"], *([self.second] if hasattr(self, "second") else [])]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled = self.lower["bag"](ids)
        if hasattr(self, "second"):
            pooled = pooled + self.second(ids.flip(0))
        return self.head(self.norm(pooled)).mean()

    def close(self) -> None:
        for bag in self.bags():
            bag.close(commit=False)


class Training:
    """A model with everything around it that a checkpoint has to keep."""

    def __init__(self, folder: Path, engine: str = "native", stores: int = 1) -> None:
        self.model = Model(folder, engine, stores)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5], 0.5)
        self.fused = torch.optim.lr_scheduler.ExponentialLR(self.model.bags()[0].fused_optimizer, 0.9)
        self.extra = {"schedules": [self.schedule, self.fused], "losses": []}

    def step(self, ids: torch.Tensor | None = None) -> None:
        if ids is None:
            ids = torch.randint(0, ROWS, (32, 4)) + random.randrange(2) * np.random.randint(1)  # noqa: NPY002
        loss = self.model(ids)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.fused.step()
        self.extra["losses"].append(loss.item())

    def save(self, folder: Path, step: int, **options: Any) -> None:
        checkpoint.save(folder, self.model, self.optimizer, step=step, extra=self.extra, **options)

    def restore(self, folder: Path, **options: Any) -> checkpoint.Restored | None:
        found = checkpoint.restore(
            folder, self.model, self.optimizer, extra={"schedules": self.extra["schedules"]}, **options
        )
        if found is not None:
            self.extra["losses"] = found.extra["losses"]
        return found

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {"losses": torch.tensor(self.extra["losses"])}
        for number, bag in enumerate(self.model.bags()):
            ids = torch.arange(ROWS)
            found |= {f"{number}.{name}": value for name, value in bag.optimizer_rows(ids).items()}
            found[f"{number}.weight"] = bag.rows(ids)
            found[f"{number}.updates"] = torch.tensor(bag.fused_optimizer.num_updates)
            found[f"{number}.lr"] = torch.tensor(bag.fused_optimizer.param_groups[0]["lr"])
        found |= {name: p.detach().clone() for name, p in self.model.named_parameters()}
        found |= {name: b.clone() for name, b in self.model.named_buffers()}
        drawn = np.random.rand()  # noqa: NPY002
        found["random"] = torch.cat([torch.rand(2), torch.tensor([random.random(), drawn])])
        return found


def equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
