"""Ids that a table does not have: an error, or id 0 with or without a warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import (
    ConfigError,
    EmbeddingBagConfig,
    EmbeddingConfig,
    InputError,
    KeyedJaggedTensor,
    TableOverride,
    TierConfig,
    optim,
)
from tierstore.modules.base import TieredModule

ROWS = 20
SPEC = optim.SGD(lr=0.5)
GIVEN = torch.tensor([3, ROWS, -1, ROWS - 1, 1 << 40, 0])
KEPT = torch.tensor([3, 0, 0, ROWS - 1, 0, 0])


def config(mode: str) -> TierConfig:
    return TierConfig(hbm="1MiB", ssd="64MiB", bounds_check=mode)


def keyed(ids: Tensor) -> KeyedJaggedTensor:
    both = torch.cat([ids, ids.flip(0)])
    return KeyedJaggedTensor(["a", "b"], both, lengths=torch.full((len(both),), 1))


def build(kind: str, mode: str) -> TieredModule:
    options: dict[str, Any] = {"config": config(mode), "optimizer": SPEC}
    if kind == "embedding":
        return tierstore.TieredEmbedding(ROWS, 4, **options)
    if kind == "bag":
        return tierstore.TieredEmbeddingBag(ROWS, 4, mode="sum", **options)
    if kind == "bags":
        return tierstore.EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a", "b"])], **options
        )
    return tierstore.EmbeddingCollection([EmbeddingConfig(ROWS, 4, "t", feature_names=["a", "b"])], **options)


KINDS = ["embedding", "bag", "bags", "rows"]


def looked_up(kind: str, module: TieredModule, ids: Tensor) -> Tensor:
    if kind in ("embedding", "bag"):
        return module(ids.view(-1, 1))
    out = module(keyed(ids))
    return torch.cat([out[key] if kind == "bags" else out[key].values() for key in ("a", "b")])


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_out_of_range_is_an_error(kind: str) -> None:
    with build(kind, "fatal") as module, pytest.raises(InputError, match=f"id {ROWS}|out of range"):
        looked_up(kind, module, GIVEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["warning", "ignore"])
def test_or_is_id_0(kind: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with build(kind, mode) as module, build(kind, "fatal") as plain:
        with caplog.at_level(logging.WARNING, "tierstore"):
            for _ in range(2):
                found, expected = looked_up(kind, module, GIVEN), looked_up(kind, plain, KEPT)
                assert torch.equal(found, expected)
                found.square().sum().backward()
                expected.square().sum().backward()
        every = torch.arange(ROWS)
        assert torch.equal(module.rows(every), plain.rows(every))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (mode == "warning"), said
    assert all(f"out of range [0, {ROWS}), such as {ROWS}" in text or "such as" in text for text in said)
    assert torch.equal(GIVEN[1], torch.tensor(ROWS)), "the batch is the user's"


@pytest.mark.parametrize("mode", ["warning", "ignore"])
@pytest.mark.parametrize("padding", [0, 1])
def test_or_is_the_row_of_padding_where_this_is_row_0(padding: int, mode: str) -> None:
    rows = torch.randn(ROWS, 4)
    options: dict[str, Any] = {"padding_idx": padding, "config": config(mode), "optimizer": SPEC}
    with tierstore.TieredEmbedding(ROWS, 4, _weight=rows, **options) as module:
        for ids in (GIVEN, GIVEN[:1], GIVEN.view(2, 3)):
            kept = torch.where((ids < 0) | (ids >= ROWS), 0, ids)
            assert torch.equal(module(ids), rows[kept])
            assert torch.equal(torch.compile(module, backend="eager")(ids), rows[kept])


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_in_a_prefetch_too(kind: str) -> None:
    batches = [keyed(GIVEN.roll(n)) for n in range(6)]
    with build(kind, "ignore") as module, build(kind, "fatal") as plain:
        for batch in tierstore.prefetch(batches, module):
            out = module(batch)
            (
                out.values() if kind == "bags" else out["a"].values() + out["b"].values()
            ).square().sum().backward()
        for n in range(6):
            out = plain(keyed(KEPT.roll(n)))
            (
                out.values() if kind == "bags" else out["a"].values() + out["b"].values()
            ).square().sum().backward()
        every = torch.arange(ROWS)
        assert torch.equal(module.rows(every), plain.rows(every))


def test_tables_may_differ() -> None:
    tables = [
        EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a"]),
        EmbeddingBagConfig(9, 4, "u", feature_names=["b"]),
    ]
    own = TierConfig(hbm="1MiB", tables={"t": TableOverride(bounds_check="ignore")})
    with tierstore.EmbeddingBagCollection(tables, config=own) as module:
        lengths = torch.ones(2, dtype=torch.int64)
        found = module(KeyedJaggedTensor(["a", "b"], torch.tensor([ROWS, 8]), lengths=lengths))
        assert torch.equal(found["a"][0], module.rows([0], "t")[0])
        with pytest.raises(InputError, match="id 9"):
            module(KeyedJaggedTensor(["a", "b"], torch.tensor([ROWS, 9]), lengths=lengths))


def test_tables_that_share_ids_must_agree() -> None:
    tables = [
        EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a"]),
        EmbeddingBagConfig(9, 4, "u", feature_names=["a"]),
    ]
    with pytest.raises(ConfigError, match="feature 'a' is looked up in tables of different sizes"):
        tierstore.EmbeddingBagCollection(tables, config=config("ignore"))
    tierstore.EmbeddingBagCollection(tables, config=config("fatal")).close()


@pytest.mark.parametrize("make", [TierConfig, TableOverride])
def test_other_names_are_refused(make: Any) -> None:
    with pytest.raises(
        ConfigError, match="bounds_check is 'none'; it must be one of 'fatal', 'warning', 'ignore'"
    ):
        make(bounds_check="none")
