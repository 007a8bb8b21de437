"""The mirror's collections beside torchrec's: the same rows, batches and optimizer give the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

import tierstore
from tests.modules.keyed_batches import ROWS, keyed_batch
from tierstore import ConfigError, TierConfig, optim
from tierstore import torchrec as mirror
from tierstore.torchrec.modules.regroup import KTRegroupAsDict

TABLES = [
    torchrec.EmbeddingBagConfig(ROWS, 4, "t0", feature_names=["a"]),
    torchrec.EmbeddingBagConfig(ROWS, 3, "t1", feature_names=["b"], pooling=torchrec.PoolingType.MEAN),
]
SEQUENCES = [torchrec.EmbeddingConfig(ROWS, 4, "t0", feature_names=["a", "b"])]
SMALL = TierConfig(hbm="64KiB", ssd="64MiB")


@pytest.fixture(autouse=True)
def small_tiers() -> Any:
    tierstore.set_default_config(SMALL)
    yield
    tierstore.set_default_config(None)


def pair(kind: str) -> tuple[Any, Any]:
    name, tables = {
        "bags": ("EmbeddingBagCollection", TABLES),
        "rows": ("EmbeddingCollection", SEQUENCES),
    }[kind]
    ours, theirs = getattr(mirror, name)(tables=tables), getattr(torchrec, name)(tables=tables)
    return ours, theirs


def values(out: Any) -> torch.Tensor:
    return (
        torch.cat([part.values().view(-1) for part in out.values()])
        if isinstance(out, dict)
        else out.values()
    )


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_they_train_alike(kind: str) -> None:
    ours, theirs = pair(kind)
    for module in (ours, theirs):
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    assert ours.engine.waits
    ours.load_state_dict(theirs.state_dict())
    assert ours.engine.config is SMALL
    with ours:
        for seed in range(4):
            batch = keyed_batch(seed, ["a", "b"]).theirs
            found, expected = values(ours(batch)), values(theirs(batch))
            torch.testing.assert_close(found, expected)
            found.square().sum().backward()
            expected.square().sum().backward()
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


APPLIED: list[tuple[type[torch.optim.Optimizer], dict[str, Any], optim.OptimizerSpec]] = [
    (torchrec.optim.SGD, {}, optim.SGD(lr=0.01)),
    (torchrec.optim.Adagrad, {"lr": 0.1}, optim.Adagrad(lr=0.1, eps=1e-8)),
    (torchrec.optim.Adam, {"learning_rate": 0.1, "beta1": 0.5}, optim.Adam(lr=0.1, betas=(0.5, 0.999))),
    (torchrec.optim.Adam, {"weight_decay": 0.1}, optim.AdamW(lr=0.01, weight_decay=0.1)),
    (torchrec.optim.LAMB, {"lr": 0.1, "beta2": 0.5}, optim.LAMB(lr=0.1, betas=(0.9, 0.5))),
    (torchrec.optim.LarsSGD, {"lr": 0.1, "momentum": 0.5}, optim.LarsSGD(lr=0.1, momentum=0.5)),
    (torchrec.optim.PartialRowWiseAdam, {"beta1": 0.5}, optim.PartialRowWiseAdam(betas=(0.5, 0.999))),
    (torchrec.optim.PartialRowWiseLAMB, {}, optim.PartialRowWiseLAMB()),
    (
        torchrec.optim.RowWiseAdagrad,
        {"lr": 0.1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.98, "weight_decay": 0.0},
        optim.RowWiseAdagrad(lr=0.1),
    ),
    (
        torchrec.optim.SGD,
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
        optim.SGD(lr=0.01, weight_decay=0.1, weight_decay_mode="decoupled"),
    ),
    (torch.optim.Adagrad, {}, optim.Adagrad()),
]


@pytest.mark.parametrize(("kind", "options", "spec"), APPLIED, ids=str)
def test_torchrecs_optimizers_have_fbgemms_words_and_defaults(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], spec: optim.OptimizerSpec
) -> None:
    ours = mirror.EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
    _apply_optimizer_in_backward(kind, ours.parameters(), options)
    assert ours.applied_optimizer() == spec


def test_words_of_fbgemm_are_not_torchs() -> None:
    ours = mirror.EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
    _apply_optimizer_in_backward(torchrec.optim.Adam, ours.parameters(), {"momentum": 0.5})
    with pytest.raises(ConfigError, match="adam has no momentum"):
        ours.applied_optimizer()


def test_outputs_go_into_torchrecs_functions() -> None:
    ours, theirs = pair("bags")
    with ours:
        ours.load_state_dict(theirs.state_dict())
        batch = keyed_batch(0, ["a", "b"]).theirs
        found, expected = ours(batch), theirs(batch)
        assert isinstance(found, mirror.KeyedTensor)
        for one, other in zip(
            mirror.KeyedTensor.regroup([found], [["b"], ["a", "b"]]),
            torchrec.KeyedTensor.regroup([expected], [["b"], ["a", "b"]]),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
        grouped = KTRegroupAsDict([["b", "a"]], ["all"])([found])
        torch.testing.assert_close(grouped["all"], torch.cat([expected["b"], expected["a"]], 1))


def test_what_scripts_ask_of_a_collection() -> None:
    ours, _ = pair("bags")
    rows, _ = pair("rows")
    with ours, rows:
        assert isinstance(ours, mirror.modules.embedding_modules.EmbeddingBagCollection)
        assert isinstance(ours, EmbeddingBagCollectionInterface)
        assert isinstance(ours, tierstore.EmbeddingBagCollection)
        assert [config.name for config in ours.embedding_bag_configs()] == ["t0", "t1"]
        assert isinstance(rows, mirror.EmbeddingCollection)
        assert rows.embedding_dim() == 4
        assert isinstance(rows(keyed_batch(0, ["a", "b"]).theirs)["a"], mirror.JaggedTensor)


def test_tables_without_an_optimizer_say_so() -> None:
    ours, _ = pair("bags")
    with ours, pytest.raises(ConfigError, match="built without an optimizer"):
        ours(keyed_batch(0, ["a", "b"]).theirs).values().sum().backward()


def test_on_meta() -> None:
    ours = mirror.EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
    assert ours.device.type == "meta"
    with pytest.raises(ConfigError, match="meta device"):
        ours(keyed_batch(0, ["a", "b"]).theirs)
