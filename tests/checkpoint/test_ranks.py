"""Models with sharded collections: all ranks are saved as one, and restored on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import TierConfig, checkpoint, optim
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.sharding import DistributedModelParallel, column_wise, construct_plan, row_wise, table_wise
from tierstore.sharding.commits import Commits

CUTS = {"t0": row_wise(), "t1": table_wise(0), "t2": column_wise([0, 1]), "t3": table_wise(1)}
ALONE = dict.fromkeys(CUTS, table_wise(0))


class Training:
    def __init__(self, folder: Path, cuts: dict[str, Any], ranks: int, engine: str = "native") -> None:
        torch.manual_seed(torch.distributed.get_rank())
        folder.mkdir(exist_ok=True)
        sparse = tierstore.EmbeddingBagCollection(
            cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05), seed=3
        )
        over = nn.Linear(36, 1)
        nn.init.constant_(over.weight, 0.1)
        nn.init.constant_(over.bias, 0.0)
        self.model = DistributedModelParallel(
            nn.ModuleDict({"sparse": sparse, "over": over}),
            plan=construct_plan(sparse, cuts, ranks, name="sparse"),
            config=TierConfig(hbm="24KiB", ssd="64MiB", path=folder / "rows", engine=engine),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.folder = folder / "checkpoints"

    def step(self, batch: Any) -> None:
        pooled = self.model.module["sparse"](batch.of([torch.distributed.get_rank()])).values()
        loss = (self.model.module["over"](pooled) * torch.rand(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():  # the model itself is not called, so DDP does not
            torch.distributed.all_reduce(parameter.grad)
        self.optimizer.step()

    def save(self, step: int) -> None:
        checkpoint.save(self.folder, self.model, self.optimizer, step=step, extra={"note": [step]})

    def restore(self) -> checkpoint.Restored | None:
        return checkpoint.restore(self.folder, self.model, self.optimizer)

    def contents(self) -> dict[str, Any]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for table in cases.tables():
            rows = self.model.module["sparse"].optimizer_rows(torch.arange(table.num_embeddings), table.name)
            found |= {f"{table.name}.{name}": value for name, value in rows.items()}
        for name, value in self.optimizer.state_dict()["state"].items():
            found |= {f"{name}.{part}": tensor for part, tensor in value.items()}
        return found


def kill(*_: Any) -> None:
    raise OSError(5, "killed")


def killed_and_resumed(path: str) -> None:
    folder, batches = Path(path), cases.batches(2, 8)
    calm = Training(folder / "calm", CUTS, 2)
    for batch in batches:
        calm.step(batch)
    expected, drawn = calm.contents(), torch.rand(1)
    calm.model.close(commit=False)

    first = Training(folder, CUTS, 2)
    assert first.restore() is None
    for step, batch in enumerate(batches[:3], 1):
        first.step(batch)
        if step in (1, 3):
            first.save(step)
    first.model.close()

    write = Commits._write
    for _ in range(3):  # killed again and again between the stores' commits and the commit of all ranks
        killed = Training(folder, CUTS, 2)
        assert killed.restore().step == 3  # type: ignore[union-attr]
        for batch in batches[3:5]:
            killed.step(batch)
        Commits._write = kill  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="killed"):
            killed.save(5)
        Commits._write = write  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="build the model anew"):
            killed.restore()
        killed.model.close()  # which is no commit of its own

    second = Training(folder, CUTS, 2)
    restored = second.restore()
    assert restored is not None
    assert (restored.step, restored.extra) == (3, {"note": [3]})
    for batch in batches[3:]:
        second.step(batch)
    torch.testing.assert_close(second.contents(), expected, rtol=0, atol=0)
    assert torch.equal(torch.rand(1), drawn)
    second.save(8)
    if torch.distributed.get_rank() == 0:
        assert len(list(second.folder.glob("*-step*"))) == 1
        torch.save(expected, folder / "expected.pt")
    with pytest.raises(ConfigError, match="keep is 2"):
        checkpoint.save(second.folder, second.model, step=9, keep=2)
    with pytest.raises(StoreMismatchError, match="does not hold the checkpoint of step 8"):
        checkpoint.restore(folder / "elsewhere", second.model)
    second.model.close()


def alone(path: str) -> None:
    folder = Path(path)
    training = Training(folder, ALONE, 1, "lmdb")
    restored = training.restore()
    assert restored is not None
    assert restored.step == 8
    torch.testing.assert_close(training.contents(), torch.load(folder / "expected.pt"), rtol=0, atol=0)
    training.save(9)
    training.model.commit()
    with pytest.raises(StoreMismatchError, match="commit that belongs to no checkpoint"):
        training.restore()
    training.model.close(commit=False)


def test_ranks_are_saved_as_one(tmp_path: Path) -> None:
    run(2, killed_and_resumed, str(tmp_path))
    run(1, alone, str(tmp_path))
