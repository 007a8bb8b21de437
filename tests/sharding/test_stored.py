"""Tables of a sharded training on disk: opened in one process, exported, inspected, verified, compacted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import InputError, StoreCorruptError, StoreLockedError, StoreMismatchError, TierConfig, optim
from tierstore.cli.main import main
from tierstore.errors import ClosedError
from tierstore.sharding import (
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    open_tables,
    row_wise,
    shard,
    table_wise,
)
from tierstore.sharding.table_sharding import TableSharding
from tierstore.store import import_, open_store

TWO = {
    "t0": row_wise([20, 30]),
    "t1": column_wise([1, 0], [4, 6]),
    "t2": table_wise(1),
    "t3": data_parallel(),
}
GRID = {"t0": grid_shard([0, 1]), "t1": grid_shard([1, 0]), "t2": row_wise(), "t3": column_wise([3, 1])}
CUTS: dict[str, tuple[int, dict[str, TableSharding]]] = {"two ranks": (2, TWO), "grid": (4, GRID)}


def train(path: str, cuts: str, optimizer: optim.OptimizerSpec, more: dict[str, Any]) -> None:
    """Train, commit twice, and leave all rows and states, as the ranks read them, beside ``path``."""
    configs, world = cases.tables(), dist.get_world_size()
    tiers = TierConfig(hbm="24KiB", uvm="16KiB", ssd="64MiB", path=path, **more)

    def opened() -> Any:
        bags = tierstore.EmbeddingBagCollection(configs, config=cases.MEMORY, optimizer=optimizer, seed=5)
        plan = construct_plan(bags, CUTS[cuts][1], world, ranks_per_host=max(1, world // 2))
        return shard(bags, plan, config=tiers)

    sharded = opened()
    for step, batch in enumerate(cases.batches(world, 4)):
        sum(
            value.square().sum() for value in sharded(batch.of([dist.get_rank()])).to_dict().values()
        ).backward()
        sharded.commit({"step": step + 1})
    sharded.close()
    sharded = opened()  # with rows as the stores have them, which may be rounded
    expected = {
        config.name: (
            sharded.rows(list(range(config.num_embeddings)), config.name),
            sharded.optimizer_rows(list(range(config.num_embeddings)), config.name),
        )
        for config in configs
    }
    touched = {config.name: [ids.tolist() for ids in sharded.touched_ids(config.name)] for config in configs}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, touched)
    if dist.get_rank() == 0:
        names = expected
        used = {name: {id for of in gathered for part in of[name] for id in part} for name in names}
        torch.save((expected, used), f"{path}.expected")
    sharded.close()


Trained = Callable[..., tuple[Path, Any, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """``trained(cuts, optimizer, ...)``: the folder, and what the ranks have read; each is trained once."""
    known: dict[str, tuple[Path, Any, Any]] = {}

    def of(cuts: str = "two ranks", optimizer: optim.OptimizerSpec | None = None, **more: Any) -> Any:
        chosen = optimizer or optim.RowWiseAdagrad(lr=0.1)
        key = repr((cuts, chosen, more))
        if key not in known:
            path = tmp_path_factory.mktemp("stored") / "tables"
            run(CUTS[cuts][0], train, str(path), cuts, chosen, more)
            known[key] = (path, *torch.load(f"{path}.expected", weights_only=False))
        return known[key]

    return of


CASES = [
    ("two ranks", optim.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5), {}),
    ("two ranks", optim.PartialRowWiseAdam(lr=0.1), {"ssd_dtype": "bf16", "state_dtype": "bf16"}),
    ("two ranks", optim.Adam(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled_global"), {}),
    ("two ranks", optim.SGD(lr=0.1), {"ssd_dtype": "int8"}),
    ("grid", optim.Adam(lr=0.1), {"ssd_dtype": "fp16"}),
]


@pytest.mark.parametrize(("cuts", "optimizer", "more"), CASES)
def test_rows_and_states_are_those_of_the_ranks(
    cuts: str, optimizer: optim.OptimizerSpec, more: dict[str, Any], trained: Trained
) -> None:
    path, expected, touched = trained(cuts, optimizer, **more)
    with open_tables(path) as tables:
        assert tables.table_names() == ["t0", "t1", "t2", "t3"]
        assert tables.extra == {"step": 4}
        for name, (rows, states) in expected.items():
            ids = torch.arange(len(rows)).flip(0)
            assert torch.equal(tables.rows(ids, name), rows.flip(0)), name
            found = tables.optimizer_rows(ids, name)
            assert list(found) == list(states)
            for state, values in states.items():
                assert torch.equal(found[state], values.flip(0)), (name, state)
            stored = torch.cat([*tables.touched_ids(name)]).tolist()
            assert len(stored) == len(set(stored)) == tables.count(tables.table_names().index(name))
            assert set(stored) == touched[name]
            assert 0 < len(stored) < len(rows), "some rows have their initial values"


@pytest.mark.parametrize(("cuts", "optimizer", "more"), CASES)
def test_an_export_is_that_of_an_unsharded_store(
    cuts: str, optimizer: optim.OptimizerSpec, more: dict[str, Any], trained: Trained, tmp_path: Path
) -> None:
    """It opens in an unsharded collection, which has the rows and states."""
    path, expected, touched = trained(cuts, optimizer, **more)
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    import_(tmp_path / "out", tmp_path / "store")
    if more.get("ssd_dtype") == "int8":
        # shards of columns have steps and offsets of their own, so that their rows become float32
        with pytest.raises(StoreMismatchError):
            _whole(tmp_path / "store", optimizer, {})
        with open_store(tmp_path / "store", read_only=True) as store:
            assert [spec.weight_dtype for spec in store.tables] == ["int8", "fp32", "int8", "int8"]
            assert [store.count(spec.index) for spec in store.tables] == [len(t) for t in touched.values()]
        return
    with _whole(tmp_path / "store", optimizer, more) as bags:
        assert bags.engine.committed_extra() == {"step": 4}
        for name, (rows, states) in expected.items():
            assert torch.equal(bags.rows(range(len(rows)), name), rows), name
            for state, values in states.items():
                assert torch.equal(bags.optimizer_rows(range(len(rows)), name)[state], values)


def _whole(path: Path, optimizer: optim.OptimizerSpec, more: dict[str, Any]) -> Any:
    tiers = TierConfig(hbm="64KiB", ssd="64MiB", path=str(path), **more)
    return tierstore.EmbeddingBagCollection(cases.tables(), config=tiers, optimizer=optimizer, seed=5)


class TestCommands:
    def result(self, capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    def error(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    @pytest.fixture
    def folder(self, trained: Trained, tmp_path: Path) -> Path:
        shutil.copytree(trained()[0], tmp_path / "copy")
        return tmp_path / "copy"

    def test_inspect(self, folder: Path, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
        found = self.result(capsys, "inspect", folder, "--count")
        assert (found["ranks"], found["engine"], found["extra"]) == (2, "native", {"step": 4})
        cuts = [(table["name"], table["sharding_type"], table["ranks"]) for table in found["tables"]]
        assert cuts[:2] == [("t0", "row_wise", [0, 1]), ("t1", "column_wise", [0, 1])]
        assert cuts[2:] == [("t2", "table_wise", [1]), ("t3", "data_parallel", [0, 1])]
        touched = trained()[2]
        assert [table["rows"] for table in found["tables"]] == [len(ids) for ids in touched.values()]
        assert main(["inspect", str(folder)]) == 0
        output = capsys.readouterr().out
        assert "tables of 2 ranks, engine native" in output
        assert "commit of all ranks: 4" in output
        assert "  step: 4" in output

    def test_commits(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = self.result(capsys, "commits", folder)
        assert (found["commit"], found["extra"]) == (4, {"step": 4})
        assert [(one["rank"], one["commit"]) for one in found["stores"]] == [(0, 4), (1, 4)]
        assert main(["commits", str(folder)]) == 0
        assert "commit of all ranks 4, made at 20" in capsys.readouterr().out
        for command in (["commits", folder, "--drop", "3"], ["inspect", folder, "--at", "best"]):
            assert "the last commit of all ranks is kept; leave --" in self.error(capsys, *command)
        assert "leave --at out" in self.error(capsys, "export", folder, folder / "out", "--at", "3")

    def test_verify(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.result(capsys, "verify", folder)["ok"] is True
        file = max(folder.glob("*/tables/rank00001/native/*.seg"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[4100:4200] = b"\xee" * 100
        file.write_bytes(data)
        found = self.result(capsys, "verify", folder, code=1)
        assert [report["ok"] for report in found["ranks"]] == [True, False]
        assert main(["verify", str(folder)]) == 1
        assert "LOST: " in capsys.readouterr().out

    def test_verify_finds_that_a_store_lacks_the_commit(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        record = json.loads((folder / "COMMIT.json").read_text())
        record["collections"][""]["ranks"][0] = 9
        (folder / "COMMIT.json").write_text(json.dumps(record))
        (lost,) = self.result(capsys, "verify", folder, code=1)["lost"]
        assert "rank00000: commit 9" in lost

    def test_compact_keeps_the_commit_of_all_ranks(
        self, folder: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
    ) -> None:
        expected = trained()[1]
        assert self.result(capsys, "compact", folder)["commits"] == 2
        record = json.loads((folder / "COMMIT.json").read_text())
        assert record["number"] == 4
        assert record["collections"][""]["ranks"] == [5, 5]
        assert self.result(capsys, "verify", folder)["ok"] is True
        with open_tables(folder) as tables:
            for name, (rows, _) in expected.items():
                assert torch.equal(tables.rows(np.arange(len(rows)), name), rows)
        (store,) = folder.glob("*/tables/rank00000")
        assert f"tierstore compact {folder}" in self.error(capsys, "compact", store)
        run(2, goes_on, str(folder), expected)

    def test_a_compaction_that_is_killed_between_two_stores_keeps_the_commit(
        self, folder: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tierstore.sharding import compaction

        done: list[int] = []

        def killed(path: Path, record: Any) -> None:
            done.append(record["number"])
            raise KeyboardInterrupt

        monkeypatch.setattr(compaction, "write_record", killed)
        with pytest.raises(KeyboardInterrupt):
            compaction.compact_ranks(folder)
        assert done == [4]
        run(2, goes_on, str(folder), trained()[1])

    def test_a_missing_rank_is_named(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (store,) = folder.glob("*/tables/rank00001")
        shutil.rmtree(store)
        for command in ("inspect", "verify", "commits", "compact"):
            assert f"{store} is missing, the store of rank 1 of 2; copy it" in self.error(
                capsys, command, folder
            )
        assert "is missing" in self.error(capsys, "export", folder, folder.parent / "out")
        assert not (folder.parent / "out").exists()

    def test_damage_of_the_record(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "COMMIT.json").write_text("{")
        for command in ("inspect", "verify", "commits", "compact"):
            assert "COMMIT.json is damaged" in self.error(capsys, command, folder)

    def test_tables_in_use(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (store,) = folder.glob("*/tables/rank00001")
        with open_store(store, keep=9):
            with pytest.raises(StoreLockedError):
                open_tables(folder)
            found = self.result(capsys, "inspect", folder)
            assert "in use" in found["not_opened"]
            assert [table["name"] for table in found["tables"]] == ["t0", "t1", "t2", "t3"]
            assert self.result(capsys, "commits", folder)["commit"] == 4
        with open_tables(folder):
            pass


def goes_on(path: str, expected: Any) -> None:
    """The ranks open the folder, have the rows, and can commit."""
    configs = cases.tables()
    bags = tierstore.EmbeddingBagCollection(
        configs, config=cases.MEMORY, optimizer=optim.RowWiseAdagrad(lr=0.1), seed=5
    )
    plan = construct_plan(bags, TWO, 2, ranks_per_host=1)
    sharded = shard(bags, plan, config=TierConfig(hbm="24KiB", ssd="64MiB", path=path))
    for name, (rows, _) in expected.items():
        assert torch.equal(sharded.rows(list(range(len(rows))), name), rows)
    assert sharded.commit() == 5
    sharded.close()


class TestBadInput:
    def test_what_is_no_sharded_folder(self, tmp_path: Path) -> None:
        with pytest.raises(StoreMismatchError, match="has no commit of all ranks"):
            open_tables(tmp_path)

    def test_unknown_tables_and_ids(self, trained: Trained) -> None:
        with open_tables(trained()[0]) as tables:
            with pytest.raises(
                InputError, match=r"there is no table 't9'; give one of \['t0', 't1', 't2', 't3'\]"
            ):
                tables.rows([0], "t9")
            with pytest.raises(InputError, match="there is no table None"):
                tables.rows([0])
            with pytest.raises(
                InputError, match=r"table 't0': id 50 at position 1 is out of range \[0, 50\)"
            ):
                tables.rows([0, 50], "t0")
            with pytest.raises(InputError, match="id -1"):
                tables.optimizer_rows([-1], "t0")
            assert tables.rows([], "t1").shape == (0, 10)
        with pytest.raises(ClosedError, match="are closed"):
            tables.rows([0], "t0")

    def test_stores_of_columns_that_have_different_rows(self, trained: Trained, tmp_path: Path) -> None:
        shutil.copytree(trained()[0], tmp_path / "copy")
        (folder,) = (tmp_path / "copy").glob("*/tables/rank00000")
        with open_store(folder, keep=9) as store:
            (spec,) = (spec for spec in store.tables if spec.name == "t1[4:10]")
            absent = sorted({*range(57)} - trained()[2]["t1"])[:1]
            key = np.array([spec.index << 48 | absent[0]], np.uint64)
            store.write(key, np.zeros((1, spec.row_bytes), np.uint8))
            store.commit(b"", "commit of all ranks 4")
            number = store.commits()[-1].id
        record = json.loads((tmp_path / "copy/COMMIT.json").read_text())
        record["collections"][""]["ranks"][0] = number
        (tmp_path / "copy/COMMIT.json").write_text(json.dumps(record))
        with (
            open_tables(tmp_path / "copy") as tables,
            pytest.raises(StoreCorruptError, match="different rows"),
        ):
            tables.export(tmp_path / "out")
