"""Collections on the meta device, and tables that are opened late: no rows until they are asked for, then the
bits of tables that were there from the start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import tierstore
from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import scramble, small_tiers
from tierstore import (
    ClosedError,
    ConfigError,
    EmbeddingBagConfig,
    EmbeddingConfig,
    StoreLockedError,
    TierConfig,
    optim,
)
from tierstore.modules import EmbeddingBagCollection, EmbeddingCollection
from tierstore.modules.collection import Collection

SPEC = optim.RowWiseAdagrad(lr=0.2)
HUGE = 1 << 40
"""Rows of a table that no machine has memory for."""


class LateBags(EmbeddingBagCollection):
    opens_late = True


class LateRows(EmbeddingCollection):
    opens_late = True


def bags(kind: type[EmbeddingBagCollection] = EmbeddingBagCollection, **options: Any) -> Collection:
    tables = [
        EmbeddingBagConfig(ROWS, 4, "t0", feature_names=["a"]),
        EmbeddingBagConfig(ROWS, 4, "t1", feature_names=["b"]),
    ]
    return kind(tables, **{"config": small_tiers([4], SPEC), **options})


def rows(kind: type[EmbeddingCollection] = EmbeddingCollection, **options: Any) -> Collection:
    tables = [
        EmbeddingConfig(ROWS, 4, "t0", feature_names=["a"]),
        EmbeddingConfig(ROWS, 4, "t1", feature_names=["b"]),
    ]
    return kind(tables, **{"config": small_tiers([4], SPEC), **options})


Make = Callable[..., Collection]
KINDS: dict[str, Make] = {"bags": bags, "rows": rows}
LATE: dict[str, Make] = {"bags": partial(bags, LateBags), "rows": partial(rows, LateRows)}


def train(module: Collection, steps: int = 3) -> list[Tensor]:
    for seed in range(steps):
        out: Any = module(keyed_batch(seed, ["a", "b"]).ours)
        parts = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
        sum(map(scramble, parts)).backward()
    every = torch.arange(ROWS)
    found = [module.rows(every, name) for name in ("t0", "t1")]
    for name in ("t0", "t1"):
        found += module.optimizer_rows(every, name).values()
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_on_meta_has_tables_and_no_rows(kind: str, tmp_path: Path) -> None:
    config = TierConfig(hbm="1MiB", ssd="64MiB", path=tmp_path / "rows")
    module = KINDS[kind](device="meta", config=config, optimizer=SPEC)
    assert module.device == torch.device("meta")
    assert module.table_names() == ["t0", "t1"]
    assert all(parameter.is_meta and parameter.requires_grad for parameter in module.parameters())
    with KINDS[kind](config=config, optimizer=SPEC) as open_one:  # the folder is free
        state = open_one.state_dict()
    found = module.state_dict()
    assert list(found) == list(state)
    assert all(found[key].is_meta and found[key].shape == state[key].shape for key in found)
    module.close()
    assert module.engine.closed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "use",
    [
        lambda module: module(keyed_batch(0, ["a", "b"]).ours),
        lambda module: module.rows([0], "t0"),
        lambda module: module.load_rows([0], torch.zeros(1, 4), table="t0"),
        lambda module: module.stats(),
        lambda module: module.commit(),
        lambda module: list(module.touched_ids("t0")),
        lambda module: module.load_state_dict({key: torch.zeros(ROWS, 4) for key in module.state_dict()}),
        lambda module: tierstore.prefetch([], module),
    ],
    ids=["forward", "rows", "load_rows", "stats", "commit", "touched_ids", "load_state_dict", "prefetch"],
)
def test_what_needs_rows_says_what_to_do(kind: str, use: Callable[[Collection], object]) -> None:
    module = KINDS[kind](device="meta", optimizer=SPEC)
    with pytest.raises(ConfigError, match=r"tables t0, t1 are on the meta device.*to_empty\(device='cpu'\)"):
        use(module)
    module.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", [False, True])
def test_leaving_meta_gives_the_rows_of_a_collection_that_never_was_there(kind: str, around: bool) -> None:
    with KINDS[kind](optimizer=SPEC) as plain, KINDS[kind](device="meta", optimizer=SPEC) as module:
        outer: nn.Module = nn.ModuleDict({"tables": module}) if around else module
        outer.to_empty(device="cpu")
        assert module.device == torch.device("cpu")
        assert same(train(module), train(plain))


def test_a_collection_on_meta_takes_no_memory_for_any_rows() -> None:
    tables = [EmbeddingBagConfig(HUGE, 64, "t")]
    module = EmbeddingBagCollection(tables, device="meta", optimizer=SPEC)
    assert module.state_dict()["embedding_bags.t.weight"].shape == (HUGE, 64)
    module.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_collection_stays_closed(kind: str) -> None:
    for module in (KINDS[kind](device="meta", optimizer=SPEC), LATE[kind](optimizer=SPEC)):
        module.close()
        module.close()
        with pytest.raises(ClosedError):
            module(keyed_batch(0, ["a", "b"]).ours)


APPLIES = [_apply_optimizer_in_backward, apply_optimizer_in_backward]
OPTIMIZERS: list[tuple[Any, dict[str, Any], optim.OptimizerSpec]] = [
    (torch.optim.SGD, {"lr": 0.5}, optim.SGD(lr=0.5)),
    (torch.optim.Adagrad, {"lr": 0.5, "eps": 0.1}, optim.Adagrad(lr=0.5, eps=0.1)),
    (torch.optim.Adam, {"lr": 0.5, "betas": (0.5, 0.6)}, optim.Adam(lr=0.5, betas=(0.5, 0.6))),
    (torch.optim.AdamW, {"lr": 0.5}, optim.AdamW(lr=0.5)),
    (RowWiseAdagrad, {"lr": 0.5, "eps": 0.1}, optim.RowWiseAdagrad(lr=0.5, eps=0.1)),
]


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize(("optimizer", "options", "spec"), OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:This API is deprecated")
def test_tables_that_wait_take_the_applied_optimizer(
    kind: str, optimizer: Any, options: dict[str, Any], spec: optim.OptimizerSpec, apply: Callable[..., None]
) -> None:
    config = small_tiers([4], spec)
    with KINDS[kind](optimizer=spec, config=config) as plain:
        expected = train(plain)
    for module in (LATE[kind](config=config), KINDS[kind](device="meta", config=config)):
        apply(optimizer, module.parameters(), options)
        module.to_empty(device="cpu")
        with module:
            assert same(train(module), expected)
            assert module.fused_optimizer.spec == spec


@pytest.mark.parametrize("kind", KINDS)
def test_tables_that_wait_take_an_applied_optimizer_each(kind: str) -> None:
    each = {"t0": optim.SGD(lr=0.5), "t1": optim.Adam(lr=0.1)}
    config = TierConfig(hbm="8KiB", ssd="64MiB")
    with KINDS[kind](optimizer=each, config=config) as plain:
        expected = train(plain)
    for module in (LATE[kind](config=config), KINDS[kind](device="meta", config=config)):
        first, second = module.parameters()
        _apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.5})
        _apply_optimizer_in_backward(torch.optim.Adam, [second], {"lr": 0.1})
        module.to_empty(device="cpu")
        with module:
            assert same(train(module), expected)
            assert [group["tables"] for group in module.fused_optimizer.param_groups] == [["t0"], ["t1"]]


@pytest.mark.parametrize("kind", KINDS)
def test_moved_parameters_keep_the_applied_optimizer_that_was_adopted(kind: str) -> None:
    with LATE[kind]() as module:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
        train(module)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        with pytest.raises(ConfigError, match="the layout of rows is fixed"):
            train(module)


@pytest.mark.parametrize(
    ("applies", "said"),
    [
        ([(torch.optim.Adadelta, {}, [0, 1])], "table 't0': there is no fused Adadelta; use one of SGD"),
        (
            [(torch.optim.SGD, {"lr": 0.1, "maximize": True}, [0, 1])],
            r"SGD with \{'lr': 0.1, 'maximize': True\} cannot be fused",
        ),
        ([(torch.optim.SGD, {"lr": 0.1}, [0])], r"tables \['t0'\] an optimizer and tables \['t1'\] none"),
        ([(torch.optim.SGD, {}, [0, 1]), (torch.optim.Adam, {}, [1])], "'t1' 2 optimizers: SGD, Adam"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_applied_optimizers_that_tables_cannot_have(
    kind: str, applies: list[tuple[Any, dict[str, Any], list[int]]], said: str
) -> None:
    with LATE[kind]() as module:
        parameters = list(module.parameters())
        for optimizer, options, numbers in applies:
            _apply_optimizer_in_backward(optimizer, [parameters[n] for n in numbers], {"lr": 0.1} | options)
        with pytest.raises(ConfigError, match=said):
            train(module)
        assert module.engine.waits


def test_a_late_collection_goes_on_from_a_commit_of_its_optimizer(tmp_path: Path) -> None:
    config = TierConfig(hbm="1MiB", ssd="64MiB", path=tmp_path / "rows")
    with bags(optimizer=SPEC, config=config) as plain:
        train(plain, 2)
        expected = plain.fused_optimizer.num_updates, plain.rows([1, 2], "t0")
    with bags(LateBags, config=config) as module:
        _apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.2})
        assert torch.equal(module.rows([1, 2], "t0"), expected[1])
        assert module.fused_optimizer.num_updates == expected[0]


def test_an_opening_that_fails_may_be_tried_again(tmp_path: Path) -> None:
    config = TierConfig(hbm="1MiB", ssd="64MiB", path=tmp_path / "rows")
    with bags(LateBags, config=config, optimizer=SPEC) as module:
        with bags(config=config, optimizer=SPEC), pytest.raises(StoreLockedError):
            train(module)
        assert module.engine.waits
        train(module)


class Large(nn.Module):
    def __init__(self, rows: int, device: str) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, 4, padding_idx=1, device=device)
        self.item = nn.EmbeddingBag(rows, 4, mode="sum", device=device)
        self.bags = torchrec.EmbeddingBagCollection(
            [
                torchrec.EmbeddingBagConfig(
                    rows, 4, "t", feature_names=["a"], weight_init_min=0.5, weight_init_max=0.75
                )
            ],
            device=torch.device(device),
        )


def test_a_table_that_no_memory_holds_is_offloaded() -> None:
    model = Large(HUGE, "meta")
    with tierstore.offload(model, TierConfig(hbm="1MiB", ssd="64MiB"), SPEC) as replaced:
        ids = torch.tensor([[0, 1, HUGE - 1]])
        before = model.user(ids), model.item(ids)
        (model.user(ids).square().sum() + model.item(ids).square().sum()).backward()
        assert not torch.equal(model.user(ids), before[0])
        assert not torch.equal(model.item(ids), before[1])
        assert not model.user(torch.tensor([1])).any(), "a row for padding is zero"
        drawn = replaced["bags"].rows(torch.arange(HUGE - 100, HUGE), "t")
        assert 0.5 <= drawn.min() < drawn.max() <= 0.75


def test_offloaded_models_begin_as_tables_of_their_kind() -> None:
    model = Large(50, "meta")
    ids = torch.arange(50)
    with (
        tierstore.offload(model, seed=3) as replaced,
        tierstore.TieredEmbeddingBag(50, 4, seed=3, name="item") as bag,
    ):
        assert torch.equal(replaced["item"].rows(ids), bag.rows(ids))


@pytest.mark.parametrize(("optimizer", "options", "spec"), OPTIMIZERS)
def test_offload_takes_the_optimizer_that_was_applied(
    optimizer: Any, options: dict[str, Any], spec: optim.OptimizerSpec
) -> None:
    model = nn.ModuleDict(
        {"a": nn.Embedding(50, 4), "b": nn.EmbeddingBag(50, 4), "frozen": nn.Embedding(50, 4)}
    )
    model["frozen"].requires_grad_(False)
    applied = [*model["a"].parameters(), *model["b"].parameters()]
    _apply_optimizer_in_backward(optimizer, applied, options)
    with tierstore.offload(model, TierConfig(hbm="1MiB")) as replaced:
        assert [one.spec for one in replaced.optimizers] == [spec, spec]
        assert replaced["frozen"].frozen
    one = nn.ModuleDict({"a": nn.Embedding(50, 4), "b": nn.EmbeddingBag(50, 4)})
    _apply_optimizer_in_backward(optimizer, one["a"].parameters(), options)
    with pytest.raises(ConfigError, match=r"tables \['a'\] an optimizer and tables \['b'\] none"):
        tierstore.offload(one)
    _apply_optimizer_in_backward(torch.optim.Adam, one["b"].parameters(), {"lr": 0.3})
    with tierstore.offload(one) as replaced:
        assert [each.spec for each in replaced.optimizers] == [spec, optim.Adam(lr=0.3)]
    tables = [torchrec.EmbeddingBagConfig(50, 4, name=name, feature_names=[name]) for name in ("t", "u")]
    bags = nn.ModuleDict({"bags": torchrec.EmbeddingBagCollection(tables=tables)})
    for name, lr in (("t", 0.1), ("u", 0.2)):
        _apply_optimizer_in_backward(
            torch.optim.SGD, bags["bags"].embedding_bags[name].parameters(), {"lr": lr}
        )
    with tierstore.offload(bags) as replaced:
        rates = [group["lr"] for fused in replaced.optimizers for group in fused.param_groups]
        assert rates == [0.1, 0.2]
