"""torch.distributed.checkpoint over the stores' commits: one checkpoint of all ranks, read by any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import tierstore
from tests.checkpoint.test_ranks import kill
from tests.checkpoint.trainings import Training, equal
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import TierConfig, checkpoint, optim
from tierstore.checkpoint.dcp import JsonLoadPlanner, JsonSavePlanner, StorageReader, StorageWriter
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.sharding import (
    DistributedModelParallel,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tierstore.sharding.commits import Commits


def state_of(model: Any, **more: Any) -> dict[str, Any]:
    with checkpoint.without_rows():
        return {"model": dict(model.state_dict()), **more}


def save(path: Path, model: Any, step: int, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=StorageWriter(path, model, step=step), planner=JsonSavePlanner())


def load(path: Path, model: Any, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=StorageReader(path, model), planner=JsonLoadPlanner())
    with checkpoint.without_rows():
        model.load_state_dict(state["model"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_in_one_process(tmp_path: Path) -> None:
    first = Training(tmp_path, stores=2)
    for step in (1, 2, 3):
        first.step()
        optimizer = first.optimizer.state_dict()
        more = {"optimizer": optimizer, "note": {"steps": [step], "tuple": (1, 2.5, None)}}
        more["(rank)"] = step  # what the writer calls its own
        if step < 3:
            save(tmp_path / "checkpoints", first.model, step, state_of(first.model, **more))
        if step == 2:
            expected = first.everything()
    assert len(list((tmp_path / "checkpoints").glob("*-step2-*"))) == 1
    assert not [file for file in (tmp_path / "checkpoints").rglob("*") if file.suffix in (".distcp", ".pt")]
    first.model.close()

    second = Training(tmp_path, stores=2)
    second.step()  # a step that is forgotten; it makes the optimizer's state
    state = state_of(second.model, optimizer=second.optimizer.state_dict(), note={"steps": [0], "tuple": ()})
    state["(rank)"] = 0
    load(tmp_path / "checkpoints", second.model, state)
    assert state["note"] == {"steps": [2], "tuple": (1, 2.5, None)}
    assert state["(rank)"] == 2
    found = second.everything()
    for name in ("random", "losses", "0.lr"):  # which this state dict has not
        expected.pop(name), found.pop(name)
    equal(found, expected)
    assert second.model.bags()[0].fused_optimizer.num_updates == 2
    with pytest.raises(StoreMismatchError, match=r"was saved by dcp\.save; read it by dcp\.load"):
        second.restore(tmp_path / "checkpoints")
    second.model.close()


CUTS = {"t0": row_wise(), "t1": table_wise(0), "t2": column_wise([0, 1]), "t3": data_parallel()}
OTHERS = {"t0": table_wise(2), "t1": row_wise(), "t2": column_wise([2, 1]), "t3": table_wise(1)}


class Model(torch.nn.Module):
    def __init__(self, sparse: tierstore.EmbeddingBagCollection) -> None:
        super().__init__()
        self.sparse = sparse
        self.over = torch.nn.Linear(36, 5)

    def forward(self, features: tierstore.KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.sparse(features).values())


def sharded(folder: Path, cuts: dict[str, Any], ranks: int, **options: Any) -> DistributedModelParallel:
    sparse = tierstore.EmbeddingBagCollection(
        cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05), seed=3
    )
    torch.manual_seed(0)
    model = Model(sparse)
    folder.mkdir(exist_ok=True)
    config = TierConfig(hbm="24KiB", ssd="64MiB", path=folder / "rows", **options)
    return DistributedModelParallel(
        model, plan=construct_plan(sparse, cuts, ranks, name="sparse"), config=config, dense="fsdp2"
    )


def step(model: DistributedModelParallel, batch: cases.Batch) -> None:
    model.module.sparse(batch.of([torch.distributed.get_rank()])).values().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def contents(model: DistributedModelParallel) -> dict[str, Any]:
    state = model.state_dict()
    found = {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}
    for table in cases.tables():
        rows = model.module.sparse.optimizer_rows(torch.arange(table.num_embeddings), table.name)
        found |= {f"{table.name}.{name}": value for name, value in rows.items()}
    return found


def write(path: str) -> None:
    folder, batches = Path(path), cases.batches(2, 4)
    model = sharded(folder, CUTS, 2)
    for number, batch in enumerate(batches[:3], 1):
        step(model, batch)
        if number < 3:
            save(folder / "checkpoints", model, number, state_of(model, step=number))
        if number == 2:
            expected = contents(model)
    record = Commits._write  # killed between the stores' commits and the commit of all ranks
    Commits._write = kill  # type: ignore[method-assign]
    with pytest.raises(dcp.CheckpointException, match="Input/output error"):
        save(folder / "checkpoints", model, 3, state_of(model, step=3))
    Commits._write = record  # type: ignore[method-assign]
    model.close()  # which is no commit of its own
    again = sharded(folder, CUTS, 2)
    state = state_of(again, step=0)
    load(folder / "checkpoints", again, state)
    assert state["step"] == 2
    torch.testing.assert_close(contents(again), expected, rtol=0, atol=0)
    if torch.distributed.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    step(again, batches[2])
    with pytest.raises(dcp.CheckpointException, match="build the model anew"):
        load(folder / "checkpoints", again, state_of(again, step=0))
    again.close(commit=False)


def a_rank_that_cannot_write(path: str) -> None:
    """The others have committed then, but the next commit is one of all ranks again."""
    for failing in (0, 1):
        folder = Path(path, str(failing))
        model, (first, second) = sharded(folder, CUTS, 2), cases.batches(2, 2)
        with pytest.raises(
            ConfigError, match=r"are sharded over the ranks .*: save them by torch\.distributed"
        ):
            checkpoint.save(folder / "checkpoints", model, step=1)
        step(model, first)
        save(folder / "checkpoints", model, 1, state_of(model))
        step(model, second)
        with pytest.MonkeyPatch.context() as patch:
            if torch.distributed.get_rank() == failing:
                patch.setattr("tierstore.checkpoint.dcp.write_tensors", kill)
            with pytest.raises(dcp.CheckpointException, match="killed"):
                save(folder / "checkpoints", model, 2, state_of(model))
        model.commit({"step": 2})
        rows = model.module.sparse.state_dict()
        model.close(commit=False)
        again = sharded(folder, CUTS, 2)
        assert again.committed_extra() == {"step": 2}
        torch.testing.assert_close(again.module.sparse.state_dict(), rows, rtol=0, atol=0)
        again.close(commit=False)


def test_commits_after_a_failed_save(tmp_path: Path) -> None:
    run(2, a_rank_that_cannot_write, str(tmp_path))


def read(path: str, ranks: int, engine: str) -> None:
    folder = Path(path)
    model = sharded(
        folder, OTHERS if ranks == 3 else dict.fromkeys(CUTS, table_wise(0)), ranks, engine=engine
    )
    state = state_of(model, step=0)
    load(folder / "checkpoints", model, state)
    assert state["step"] == 2
    torch.testing.assert_close(contents(model), torch.load(folder / "expected.pt"), rtol=0, atol=0)
    with pytest.raises(StoreMismatchError, match=r"was saved by dcp\.save"):
        checkpoint.restore(folder / "checkpoints", model)
    model.close(commit=False)


def test_other_ranks_plans_and_engines(tmp_path: Path) -> None:
    run(2, write, str(tmp_path))
    run(3, read, str(tmp_path), 3, "native")
    run(1, read, str(tmp_path), 1, "lmdb")
