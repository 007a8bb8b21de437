"""The configuration of tables that are built without one: set in Python, or by environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore
from tierstore import ConfigError, EmbeddingBagConfig, EmbeddingConfig, TierConfig
from tierstore.default_config import VARIABLES, default_config, given_default

SMALL = TierConfig(hbm="1MiB", ssd="64MiB")


@pytest.fixture(autouse=True)
def without_defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    yield
    tierstore.set_default_config(None)


def offloaded() -> TierConfig:
    with tierstore.offload(nn.Sequential(nn.Embedding(10, 4))) as replaced:
        return replaced.engine.config


def config_of(make: Callable[[], tierstore.modules.base.TieredModule]) -> TierConfig:
    with make() as module:
        return module.engine.config


BUILDS: dict[str, Callable[[], TierConfig]] = {
    "embedding": lambda: config_of(lambda: tierstore.TieredEmbedding(10, 4)),
    "bag": lambda: config_of(lambda: tierstore.TieredEmbeddingBag(10, 4)),
    "bags": lambda: config_of(lambda: tierstore.EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t")])),
    "rows": lambda: config_of(lambda: tierstore.EmbeddingCollection([EmbeddingConfig(10, 4, "t")])),
    "offload": offloaded,
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_every_table_takes_the_default(build: Callable[[], TierConfig]) -> None:
    assert build() == TierConfig()
    tierstore.set_default_config(SMALL)
    assert build() is SMALL
    tierstore.set_default_config(None)
    assert build() == TierConfig()


def test_an_argument_precedes_the_default() -> None:
    tierstore.set_default_config(SMALL)
    own = TierConfig(hbm="2MiB")
    with tierstore.TieredEmbedding(10, 4, config=own) as table:
        assert table.engine.config is own


def test_the_environment_gives_budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"hbm": "3MiB", "uvm": "2MiB", "ssd": "64MiB", "path": str(tmp_path / "rows")}
    for field, value in values.items():
        monkeypatch.setenv(VARIABLES[field], value)
    assert default_config() == TierConfig(**values)
    with tierstore.TieredEmbeddingBag(10, 4, optimizer=tierstore.optim.SGD(lr=1.0)) as table:
        table(torch.tensor([[1, 2]])).sum().backward()
        trained = table.rows([1])
    with tierstore.TieredEmbeddingBag(10, 4, optimizer=tierstore.optim.SGD(lr=1.0)) as table:
        assert torch.equal(table.rows([1]), trained)
    tierstore.set_default_config(SMALL)
    assert default_config() is SMALL


def test_several_folders_are_divided_as_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_PATH", os.pathsep.join(["/a/rows", "/b/rows"]))
    assert default_config().paths == ("/a/rows", "/b/rows")


def test_empty_variables_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_HBM", "")
    assert given_default() is None
    monkeypatch.setenv("TIERSTORE_HBM", "all")
    assert default_config().keeps_all


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hbm", "lots", "environment variables TIERSTORE_HBM: hbm is 'lots'; write bytes"),
        ("hbm", "0", "TIERSTORE_HBM: hbm is 0"),
        ("uvm", "-1", "TIERSTORE_UVM: uvm is '-1'"),
        ("ssd", "1 gig", "TIERSTORE_SSD: ssd is '1 gig'"),
        ("path", os.pathsep, "TIERSTORE_PATH: path is empty"),
    ],
)
def test_wrong_variables_are_named(
    field: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[field], value)
    with pytest.raises(ConfigError, match=said):
        tierstore.TieredEmbedding(10, 4)


def test_a_default_must_be_a_configuration() -> None:
    with pytest.raises(ConfigError, match=r"config is '1GiB'; give a tierstore\.TierConfig"):
        tierstore.set_default_config("1GiB")  # type: ignore[arg-type]
    assert given_default() is None
