"""rows, optimizer_rows, load_rows, state dicts, commit and close, on every kind of tiered module."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec

from tests.modules.keyed_batches import keyed_batch
from tests.modules.module_oracles import all_rows, small_tiers
from tierstore import TierConfig, optim
from tierstore.errors import ClosedError, ConfigError, InputError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)

ROWS = 60
SPEC = optim.Adam(lr=0.1)
KINDS = ["bag", "embedding", "bag collection", "collection"]


def make(kind: str, config: TierConfig | None = None, spec: optim.OptimizerSpec | None = SPEC) -> Any:
    config = config or small_tiers([4, 3], SPEC)
    options: dict[str, Any] = {"config": config, "optimizer": spec}
    if kind == "bag":
        return TieredEmbeddingBag(ROWS, 4, **options)
    if kind == "embedding":
        return TieredEmbedding(ROWS, 4, **options)
    if kind == "bag collection":
        return EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, 4, "t0"), EmbeddingBagConfig(ROWS, 3, "t1")], **options
        )
    return EmbeddingCollection([EmbeddingConfig(ROWS, 4, "t0"), EmbeddingConfig(ROWS, 3, "t1")], **options)


def table_of(kind: str) -> list[str]:
    return ["t0"] if "collection" in kind else []


def step(module: Any, kind: str, seed: int = 1) -> None:
    """One training step that touches about half the rows."""
    random = torch.Generator().manual_seed(seed)
    if "collection" in kind:
        out = module(keyed_batch(seed, ["t0", "t1"], 8).ours)
        total = out.values().sin().sum() if kind == "bag collection" else out["t0"].values().sin().sum()
    else:
        total = module(torch.randint(0, ROWS, (10, 3), generator=random)).sin().sum()
    total.backward()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def module(kind: str) -> Iterator[Any]:
    with make(kind) as made:
        yield made


def test_rows_are_written_and_read_back(module: Any, kind: str) -> None:
    table = table_of(kind)
    ids = torch.tensor([5, 0, 59, 17])
    weight = torch.rand(4, 4)
    state = {"exp_avg": torch.rand(4, 4), "exp_avg_sq": torch.rand(4, 4)}
    untouched = module.rows([3], *table)
    module.load_rows(ids, weight, state, *table)
    assert torch.equal(module.rows(ids, *table), weight)
    assert torch.equal(module.rows([17, 5, 5], *table), weight[[3, 0, 0]])
    for name, part in module.optimizer_rows(ids, *table).items():
        assert torch.equal(part, state[name])
    module.load_rows(ids[:1], weight[1:2], None, *table)
    assert torch.equal(module.optimizer_rows(ids[:1], *table)["exp_avg"], state["exp_avg"][:1])
    assert torch.equal(module.rows([3], *table), untouched)
    assert sorted(torch.cat(list(module.touched_ids(*table))).tolist()) == [0, 5, 17, 59]


def test_training_goes_on_from_what_was_loaded(kind: str) -> None:
    """Rows and optimizer state of one module continue in another, bit for bit."""
    with make(kind) as one, make(kind) as other:
        step(one, kind)
        for table in ["t0", "t1"] if "collection" in kind else [None]:
            ids = torch.arange(ROWS)
            other.load_rows(ids, one.rows(ids, table), one.optimizer_rows(ids, table), table)
        other.fused_optimizer.load_state_dict(one.fused_optimizer.state_dict())
        for module in (one, other):
            step(module, kind, seed=2)
        assert torch.equal(all_rows(one, ROWS, *table_of(kind)), all_rows(other, ROWS, *table_of(kind)))


def test_reset_parameters_begins_anew(kind: str) -> None:
    with make(kind) as module, make(kind) as fresh:
        step(module, kind)
        module.reset_parameters()
        assert module.fused_optimizer.num_updates == 0
        for one in (module, fresh):
            step(one, kind, seed=2)
        for table in ["t0", "t1"] if "collection" in kind else [None]:
            assert torch.equal(all_rows(module, ROWS, table), all_rows(fresh, ROWS, table))
            states = [one.optimizer_rows(torch.arange(ROWS), table) for one in (module, fresh)]
            torch.testing.assert_close(*states, rtol=0, atol=0)


def test_reset_parameters_keeps_padding_at_zero() -> None:
    with TieredEmbedding(ROWS, 4, 3, config=small_tiers([4], SPEC), optimizer=SPEC) as module:
        module.load_rows([3], torch.ones(1, 4))
        module.reset_parameters()
        assert not module(torch.tensor([3])).any()
        assert module(torch.tensor([4])).any()


def test_ids_that_are_no_integers(module: Any, kind: str) -> None:
    for ids in (["x"], [[1, 2], [3]], [1.5]):
        with pytest.raises(InputError, match="ids must be a 1-D"):
            module.rows(ids, *table_of(kind))


def test_statistics(module: Any, kind: str) -> None:
    step(module, kind)
    stats = module.stats()
    assert stats["tiers"]["hbm"]["rows"] > 0
    assert set(stats["tiers"]["hbm"]["hit_rate"]) == {"per_access", "per_unique"}
    assert stats["store"]["engine"] == "memory"
    module.reset_stats()
    assert module.stats()["tiers"]["hbm"]["rows"] == 0


def test_learning_rates_change_during_training(module: Any, kind: str) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(module.fused_optimizer, lambda epoch: 0.0 if epoch else 1.0)
    step(module, kind)
    trained = all_rows(module, ROWS, *table_of(kind))
    scheduler.step()
    step(module, kind)
    assert torch.equal(all_rows(module, ROWS, *table_of(kind)), trained)


def test_a_committed_store_is_opened_again(kind: str, tmp_path: Path) -> None:
    config = small_tiers([4, 3], SPEC, engine="rocksdb", path=str(tmp_path / "store"))
    table = table_of(kind)
    with make(kind, config) as module:
        step(module, kind)
        module.flush()
        assert module.commit() >= 1
        committed, updates = all_rows(module, ROWS, *table), module.fused_optimizer.num_updates
        step(module, kind)
        module.close(commit=False)
    with make(kind, config) as module:
        assert torch.equal(all_rows(module, ROWS, *table), committed)
        assert module.fused_optimizer.num_updates == updates == 1


def test_use_after_close(kind: str) -> None:
    module = make(kind)
    with module:
        pass
    module.close()
    calls: list[Callable[[], Any]] = [
        lambda: step(module, kind),
        lambda: step(module.eval(), kind),
        lambda: module.rows([1], *table_of(kind)),
        lambda: module.load_rows([1], torch.zeros(1, 4), None, *table_of(kind)),
        module.commit,
        module.flush,
        module.state_dict,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_state_dicts_are_torchs() -> None:
    names = {
        "bag": torch.nn.EmbeddingBag(ROWS, 4),
        "embedding": torch.nn.Embedding(ROWS, 4),
        "bag collection": torchrec.EmbeddingBagCollection(
            [torchrec.EmbeddingBagConfig(ROWS, 4, "t0"), torchrec.EmbeddingBagConfig(ROWS, 3, "t1")]
        ),
    }
    for kind, theirs in names.items():
        with make(kind) as ours:
            holder = torch.nn.Sequential(ours)
            assert [f"0.{name}" for name in theirs.state_dict()] == list(holder.state_dict())
            ours.load_state_dict(theirs.state_dict())
            for name, weight in ours.state_dict().items():
                assert torch.equal(weight, theirs.state_dict()[name])
            step(ours, kind)
            theirs.load_state_dict(ours.state_dict())
            assert torch.equal(theirs.state_dict()[name], ours.state_dict()[name])


def test_state_dicts_that_do_not_fit(module: Any, kind: str) -> None:
    before = module.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    assert module.load_state_dict({}, strict=False).missing_keys == list(before)
    wrong = {name: weight[:-1] for name, weight in before.items()}
    with pytest.raises(
        RuntimeError, match=r"size mismatch for .*weight: got \(59, 4\), the table has \(60, 4\)"
    ):
        module.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(before | {"extra": torch.zeros(1)})
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, before[name])


def test_tables_too_large_for_a_state_dict(caplog: pytest.LogCaptureFixture) -> None:
    config = TierConfig(hbm="1MiB", engine="memory")
    with TieredEmbeddingBag(10**12, 64, config=config) as module:
        with caplog.at_level(logging.WARNING, logger="tierstore"):
            state = module.state_dict()
        assert "without its rows" in caplog.text
        assert state["weight"].dtype == torch.uint8
        row = module.rows([10**12 - 1])
        module.load_state_dict(state)
        assert torch.equal(module.rows([10**12 - 1]), row)


def test_there_is_no_weight_tensor(module: Any, kind: str) -> None:
    """``weight`` of a collection's tables is in test_table_weight.py."""
    if "collection" not in kind:
        assert not hasattr(module, "weight")
        with pytest.raises(AttributeError, match=r"read them with rows\(ids\)"):
            module.weight  # noqa: B018
        for weight in (torch.zeros(60, 4), torch.nn.Parameter(torch.zeros(60, 4))):
            with pytest.raises(ConfigError, match=r"load_rows\(ids, weight\)"):
                module.weight = weight
        with pytest.raises(ConfigError, match="lookups would not read"):
            torch.func.functional_call(module, module.state_dict(), (torch.tensor([[1]]),))
    assert all(parameter.shape[0] == parameter.numel() == 0 for parameter in module.parameters())


def test_tables_of_a_collection_are_named(kind: str) -> None:
    if "collection" not in kind:
        return
    with make(kind) as module:
        with pytest.raises(InputError, match=r"there is no table None; name one of \['t0', 't1'\]"):
            module.rows([1])
        with pytest.raises(InputError, match="there is no table 'x'"):
            module.rows([1], "x")
        view = (module.embedding_bags if kind == "bag collection" else module.embeddings)["t1"]
        view.load_rows([7], torch.ones(1, 3))
        assert view.rows([7]).tolist() == module.rows([7], "t1").tolist() == [[1, 1, 1]]
        assert set(view.optimizer_rows([7])) == {"exp_avg", "exp_avg_sq"}
        assert "60, 3" in repr(view)


def test_modules_are_not_copied_or_pickled(module: Any) -> None:
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*load_state_dict"):
            copied(torch.nn.Sequential(module) if copied is not copy.copy else module)


def test_hooks_and_names_of_the_module_tree(module: Any, kind: str) -> None:
    assert repr(module).startswith(type(module).__name__)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    step(module, kind)
    assert seen == [1]


@pytest.mark.parametrize("name", ["items", "type", "training", "weight"])
def test_tables_may_be_called_like_attributes_of_modules(name: str) -> None:
    """torch's ModuleDict refuses such names."""
    collection = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, name), EmbeddingBagConfig(ROWS, 4, "t")])
    assert list(collection.state_dict()) == [f"embedding_bags.{name}.weight", "embedding_bags.t.weight"]
    other = EmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, 4, name), EmbeddingBagConfig(ROWS, 4, "t")], seed=1
    )
    other.load_state_dict(collection.state_dict())
    view = other.embedding_bags[name]
    assert torch.equal(view.rows(torch.arange(ROWS)), collection.rows(torch.arange(ROWS), name))
