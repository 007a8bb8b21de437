"""Every standard way to save and load: rows and their state come back bit for bit, or an error says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    checkpoint,
    offload,
    optim,
)
from tierstore.errors import ConfigError, StoreMismatchError, TierStoreError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, DIM = 60, 5
SPECS = [
    optim.SGD(lr=0.1),
    optim.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.2),
    optim.Adagrad(lr=0.1),
    optim.Adam(lr=0.1),
    optim.AdamW(lr=0.1),
]
KINDS = ["embedding", "bag", "bag collection", "collection", "offloaded"]
State = dict[str, Any]


def make(kind: str, spec: optim.OptimizerSpec | None, path: Path | None = None) -> Any:
    """A module of that kind, with an optimizer of its own."""
    config = TierConfig(hbm="1MiB", ssd="64MiB", path=path)
    options: Any = {"config": config, "optimizer": spec}
    if kind == "embedding":
        return TieredEmbedding(ROWS, DIM, padding_idx=3, **options)
    if kind == "bag":
        return TieredEmbeddingBag(ROWS, DIM, mode="sum", name="item", **options)
    names = {"t0": ["a"], "t1": ["b", "c"]}
    if kind == "bag collection":
        tables = [EmbeddingBagConfig(ROWS, DIM, name, feature_names=f) for name, f in names.items()]
        return EmbeddingBagCollection(tables, **options)
    if kind == "collection":
        rows = [EmbeddingConfig(ROWS, DIM, name, feature_names=f) for name, f in names.items()]
        return EmbeddingCollection(rows, **options)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"one": torch.nn.Embedding(ROWS, DIM)})
    offload(model, config, spec)
    return model["one"]


def train(module: Any, steps: int, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (12,), generator=random)
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            keyed = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=torch.full((6,), 2))
            out: Any = module(keyed)
            parts = out.values() if isinstance(module, EmbeddingCollection) else [out]
            total = sum(part.values().square().sum() for part in parts)
        else:
            total = module(ids.view(4, 3)).square().sum()
        total.backward()


def contents(module: Any) -> list[torch.Tensor]:
    found = [torch.tensor(module.fused_optimizer.num_updates)]
    for table in module.table_names():
        ids = torch.arange(ROWS)
        found += [module.rows(ids, table), *module.optimizer_rows(ids, table).values()]
    return found


def same(module: Any, other: Any) -> bool:
    return all(map(torch.equal, contents(module), contents(other)))


# Each takes the state of a module and gives it to another one, by a file or not.
def by_hand(state: State, target: State, folder: Path) -> State:
    return state


def by_copy(state: State, target: State, folder: Path) -> State:
    return copy.deepcopy(state)


def by_torch_save(state: State, target: State, folder: Path) -> State:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def by_dcp(state: State, target: State, folder: Path) -> State:
    dcp.save(state, checkpoint_id=folder / "dcp")
    dcp.load(target, checkpoint_id=folder / "dcp")
    return target


def by_safetensors(state: State, target: State, folder: Path) -> State:
    """Tensors alone: the rest of the state is kept by hand."""
    tensors = {f"model {name}": value for name, value in state["model"].items()}
    for weight, parts in state["optimizer"]["state"].items():
        tensors |= {f"optimizer {weight} {name}": value for name, value in parts.items()}
    safetensors.torch.save_file(tensors, folder / "state.safetensors")
    read = safetensors.torch.load_file(folder / "state.safetensors")
    model = {name.split(" ")[1]: value for name, value in read.items() if name.startswith("model ")}
    of_rows: State = {}
    for name, value in read.items():
        if name.startswith("optimizer "):
            _, weight, part = name.split(" ")
            of_rows.setdefault(weight, {})[part] = value
    return {"model": model, "optimizer": {**state["optimizer"], "state": of_rows}}


WAYS = [by_hand, by_copy, by_torch_save, by_dcp, by_safetensors]
Way = Callable[[State, State, Path], State]


def state_of(module: Any) -> State:
    return {"model": dict(module.state_dict()), "optimizer": module.fused_optimizer.state_dict()}


def transfer(way: Way, module: Any, other: Any, folder: Path) -> None:
    state = way(state_of(module), state_of(other), folder)
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optimizer"])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of this file are one byte too large for state dicts."""
    monkeypatch.setattr("tierstore.modules.left_out.STATE_DICT_LIMIT", 4 * ROWS * DIM - 1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("way", WAYS)
def test_small_tables_go_on_bit_for_bit(way: Way, spec: optim.OptimizerSpec, tmp_path: Path) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        with make(kind, spec) as one, make(kind, spec) as other:
            train(one, 3)
            transfer(way, one, other, folder)
            assert same(one, other)
            for module in (one, other):
                train(module, 3, seed=1)
            assert same(one, other)


def test_exactly_as_large_as_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tierstore.modules.left_out.STATE_DICT_LIMIT", 4 * ROWS * DIM)
    test_small_tables_go_on_bit_for_bit(by_hand, SPECS[3], tmp_path)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_large_tables_are_named_at_loading(way: Way, kind: str, tmp_path: Path) -> None:
    with make(kind, SPECS[3]) as one, make(kind, SPECS[3]) as other:
        train(one, 2)
        train(other, 2, seed=1)
        before = contents(other)
        state = way(state_of(one), state_of(other), tmp_path)
        for loads, given in ((other, "model"), (other.fused_optimizer, "optimizer")):
            with pytest.raises(StoreMismatchError, match=r"checkpoint\.save and restore; or commit\(\)"):
                loads.load_state_dict(state[given])
        assert all(map(torch.equal, contents(other), before))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "offloaded"])
def test_large_tables_at_the_same_commit(way: Way, kind: str, tmp_path: Path) -> None:
    """The rows are in the store, and everything else in the state dict."""
    with make(kind, SPECS[3], tmp_path / "rows") as one:
        train(one, 2)
        one.commit()
        state = copy.deepcopy(state_of(one))
        expected = contents(one)
    with make(kind, SPECS[3], tmp_path / "rows") as again:
        state = way(state, state_of(again), tmp_path)
        again.load_state_dict(state["model"])
        again.fused_optimizer.load_state_dict(state["optimizer"])
        assert all(map(torch.equal, contents(again), expected))
        again.load_state_dict(state["model"])  # nothing has changed yet
        train(again, 1)
        with pytest.raises(StoreMismatchError):
            again.load_state_dict(state["model"])
        again.commit()
    with make(kind, SPECS[3], tmp_path / "rows") as later, pytest.raises(StoreMismatchError):
        later.fused_optimizer.load_state_dict(state["optimizer"])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.load_rows([1], torch.ones(1, DIM)),
        lambda module: train(module, 1),
        lambda module: module.reset_parameters(),
    ],
    ids=["load_rows", "train", "reset_parameters"],
)
def test_whatever_changes_rows_is_noticed(change: Callable[[Any], None]) -> None:
    with make("bag", SPECS[3]) as module:
        train(module, 1)
        state = module.state_dict()
        module.load_state_dict(state)
        module(torch.tensor([[1, 2]]))  # looked up, not updated
        module.rows([5])
        module.load_state_dict(state)
        change(module)
        with pytest.raises(StoreMismatchError):
            module.load_state_dict(state)


@pytest.mark.usefixtures("large")
def test_untouched_tables_of_one_seed_have_the_same_rows() -> None:
    with make("bag", SPECS[3]) as one, make("bag", SPECS[3]) as other:
        other.load_state_dict(one.state_dict())
        other.fused_optimizer.load_state_dict(one.fused_optimizer.state_dict())
        state = one.state_dict()
    another = TieredEmbeddingBag(ROWS, DIM, mode="sum", name="item", seed=1, optimizer=SPECS[3])
    with another, pytest.raises(StoreMismatchError):
        another.load_state_dict(state)


def test_a_small_table_beside_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the one changes nothing of the other."""
    monkeypatch.setattr("tierstore.modules.left_out.STATE_DICT_LIMIT", 4 * ROWS * DIM)
    tables = [EmbeddingBagConfig(rows, DIM, f"t{rows}") for rows in (ROWS - 1, ROWS + 1, ROWS)]
    options: Any = {"optimizer": SPECS[3], "config": TierConfig(ssd="64MiB", path=tmp_path)}
    keyed = KeyedJaggedTensor([t.name for t in tables], torch.arange(6), lengths=torch.full((3,), 2))
    with EmbeddingBagCollection(tables, **options) as one:
        one(keyed).values().square().sum().backward()
        one.commit()
        state = state_of(one)
        assert [value.dtype for value in state["model"].values()] == [
            torch.float32,
            torch.uint8,
            torch.float32,
        ]
    with EmbeddingBagCollection(tables, **options) as again:
        for _ in range(2):
            again.load_state_dict(state["model"])
            again.fused_optimizer.load_state_dict(state["optimizer"])
        found = state_of(again)["optimizer"]["state"]
        for weight, parts in state["optimizer"]["state"].items():
            assert all(torch.equal(found[weight][name], value) for name, value in parts.items())


def test_names_and_shapes_are_torchs() -> None:
    """As the keyed optimizer of sharded tables, and torchrec's, has them."""
    with make("bag collection", SPECS[3]) as module:
        train(module, 2)
        found = module.fused_optimizer.state_dict()
        assert list(found["state"]) == list(module.state_dict())
        assert found["param_groups"][0]["params"] == list(module.state_dict())
        part = found["state"]["embedding_bags.t1.weight"]
        shapes = {name: tuple(value.shape) for name, value in part.items()}
        assert shapes == {"t1.step": (), "t1.exp_avg": (ROWS, DIM), "t1.exp_avg_sq": (ROWS, DIM)}
        assert part["t1.step"] == 2
    with make("embedding", SPECS[1]) as module:
        part = module.fused_optimizer.state_dict()["state"]["weight"]
        assert tuple(part["embedding.sum"].shape) == (ROWS,)
        assert part["embedding.sum"].eq(SPECS[1].initial_state).all()


def without_state(state: State) -> State:
    return {**state, "state": {}}


def of_other_tables(state: State) -> State:
    return {**state, "state": {"other.weight": state["state"]["weight"]}}


def cut(state: State) -> State:
    parts = {name: value[:-1] if value.dim() else value for name, value in state["state"]["weight"].items()}
    return {**state, "state": {"weight": parts}}


def half(state: State) -> State:
    parts = dict(list(state["state"]["weight"].items())[:2])
    return {**state, "state": {"weight": parts}}


@pytest.mark.parametrize("damage", [without_state, of_other_tables, cut, half])
def test_what_is_missing_is_an_error(damage: Callable[[State], State]) -> None:
    with make("bag", SPECS[3]) as one, make("bag", SPECS[3]) as other:
        train(one, 2)
        train(other, 1, seed=1)
        before = contents(other)
        state = damage(one.fused_optimizer.state_dict())
        with pytest.raises(ConfigError, match="optimizer state of"):
            other.fused_optimizer.load_state_dict(state)
        assert all(map(torch.equal, contents(other), before))


def test_rows_without_data_are_an_error() -> None:
    """As they were in state dicts of large tables once."""
    with make("bag", SPECS[3]) as module, pytest.raises(StoreMismatchError):
        module.load_state_dict({"weight": torch.empty(ROWS, DIM, device="meta")})


def test_the_count_of_updates_is_committed(tmp_path: Path) -> None:
    with make("bag", SPECS[3]) as one:
        train(one, 4)
        state = state_of(one)
    with make("bag", SPECS[3], tmp_path) as other:
        other.load_state_dict(state["model"])
        other.fused_optimizer.load_state_dict(state["optimizer"])
        other.commit()
    with make("bag", SPECS[3], tmp_path) as again:
        assert again.fused_optimizer.num_updates == 4


def test_within_without_rows_there_is_no_state_of_rows() -> None:
    with make("bag", SPECS[3]) as one:
        train(one, 2)
        with checkpoint.without_rows():
            state = one.fused_optimizer.state_dict()
            assert state["state"] == {}
            assert state["num_updates"] == 2
            one.fused_optimizer.load_state_dict(state)
        with pytest.raises(ConfigError, match="without_rows"):
            one.fused_optimizer.load_state_dict(state)


def test_frozen_tables_have_no_state() -> None:
    with make("bag", None) as one, make("bag", None) as other:
        assert one.fused_optimizer.state_dict()["state"] == {}
        other.fused_optimizer.load_state_dict(one.fused_optimizer.state_dict())


def test_copies_do_not_take_the_state_of_rows() -> None:
    with make("bag", SPECS[3]) as module:
        train(module, 1)
        copied = copy.deepcopy(module.fused_optimizer)
        with pytest.raises(ConfigError, match="a copy without rows"):
            copied.load_state_dict(module.fused_optimizer.state_dict())
        with pytest.raises(ConfigError, match="optimizer state of no rows"):
            module.fused_optimizer.load_state_dict(copied.state_dict())


def test_an_optimizer_that_outlives_its_tables() -> None:
    optimizer = make("bag", SPECS[3]).fused_optimizer
    with pytest.raises(TierStoreError, match="tables of this optimizer are gone"):
        optimizer.state_dict()
