"""A rank's store that is full: every rank hears of it, and the tables of all ranks stay open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierstore
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, KeyedJaggedTensor, TierConfig, optim
from tierstore.errors import ConfigError, StoreFullError
from tierstore.sharding import ShardedCollection, ShardingEnv, construct_plan, row_wise, shard

ROWS, DIM = 30_000, 64
SMALL = 1000
"""Rows on rank 1, whose store never is full."""
STEP = 5000


def build(path: str | None) -> ShardedCollection:
    """Rank 0 has all rows but a few, and room for them in hbm, but not in its store."""
    env = ShardingEnv.of(None)
    config = EmbeddingConfig(ROWS, DIM, "t", feature_names=["f"])
    whole = tierstore.EmbeddingCollection(
        [config], config=TierConfig(hbm="all"), optimizer=optim.SGD(lr=0.5), seed=3
    )
    plan = construct_plan(whole, {"t": row_wise([ROWS - SMALL, SMALL])}, 2)
    tiers = TierConfig(hbm="all") if path is None else TierConfig(hbm="16MiB", ssd="5MiB", path=path)
    return shard(whole, plan, env, config=tiers)


def train(parts: ShardedCollection, first: int) -> None:
    """Every rank looks up the same ids, some of them on rank 1."""
    ids = torch.arange(first, first + STEP)
    ids = torch.cat([ids, ROWS - 1 - ids % SMALL])
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.long))
    parts(features)["f"].values().sum().backward()


def fill(parts: ShardedCollection) -> None:
    """Trains more rows than the store of rank 0 holds; they are written by the commit."""
    for first in range(0, ROWS, STEP):
        train(parts, first)


def closes_with_room(path: str, in_except: bool) -> None:
    parts = build(path)
    fill(parts)
    whole = build(None)
    fill(whole)
    ids = torch.arange(ROWS)
    expected = whole.rows(ids)
    whole.close()
    with pytest.raises(StoreFullError, match=r"rank 0: .*raise the cap by at least"):
        parts.commit()
    with pytest.raises(StoreFullError, match=r"rank 0: .*raise the cap by at least"):
        parts.close()
    assert not parts.engine.closed
    assert torch.equal(parts.rows(ids), expected)
    if in_except:
        try:
            parts.close()
        except StoreFullError:
            parts.set_ssd("64MiB")
            parts.close()
    else:
        parts.set_ssd("64MiB")
        train(parts, 0)
        parts.commit()
        parts.close()
    assert parts.engine.closed
    found = build(path)
    assert not found.is_fresh
    if in_except:
        assert torch.equal(found.rows(ids), expected)
    found.close()


@pytest.mark.parametrize("in_except", [False, True])
def test_tables_stay_open_on_all_ranks(tmp_path: Path, in_except: bool) -> None:
    run(2, closes_with_room, str(tmp_path), in_except)


def gives_up(path: str) -> None:
    parts = build(path)
    train(parts, 0)
    parts.commit()
    before = parts.rows(torch.arange(ROWS))
    fill(parts)
    with pytest.raises(StoreFullError):
        parts.close()
    parts.close(commit=False)
    assert parts.engine.closed
    found = build(path)
    assert torch.equal(found.rows(torch.arange(ROWS)), before)
    found.close()


def test_what_does_not_fit_can_be_given_up(tmp_path: Path) -> None:
    run(2, gives_up, str(tmp_path))


def another_error(path: str) -> None:
    """A rank that fails otherwise closes all, as ever."""
    parts = build(path)
    fill(parts)
    if parts.env.rank:

        def fail(*_: object) -> int:
            raise OSError("broken")

        parts.engine.commit = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="rank 1: broken"):
        parts.close()
    assert parts.engine.closed


def test_other_errors_still_close(tmp_path: Path) -> None:
    run(2, another_error, str(tmp_path))
