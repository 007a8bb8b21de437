"""A training whose store is full: nothing is given up in silence, and with more room it goes on."""

from __future__ import annotations

import pytest
import torch

from tests.store.test_disk_full import files_no_larger_than
from tierstore import TierConfig, TieredEmbedding, optim
from tierstore.errors import ClosedError, ConfigError, StoreFullError

ROWS, DIM = 30_000, 64
CONFIG = {"hbm": "1MiB", "ssd": "5MiB"}


def build(config: TierConfig) -> TieredEmbedding:
    return TieredEmbedding(ROWS, DIM, config=config, optimizer=optim.SGD(lr=0.5))


def train(module: TieredEmbedding, ids: torch.Tensor) -> None:
    module(ids).sum().backward()


def fill(module: TieredEmbedding) -> list[torch.Tensor]:
    """Trains until there is no more room; returns the batches whose step was done."""
    done: list[torch.Tensor] = []
    for first in range(0, ROWS, 500):
        batch = torch.arange(first, first + 500)
        try:
            train(module, batch)
        except StoreFullError:
            return done
        done.append(batch)
    pytest.fail("the store never was full")


def expected(batches: list[torch.Tensor]) -> torch.Tensor:
    with build(TierConfig(hbm="all")) as whole:
        for batch in batches:
            train(whole, batch)
        return whole.rows(torch.arange(ROWS))


def test_training_goes_on_when_room_is_given(tmp_path):
    config = TierConfig(path=tmp_path / "s", **CONFIG)
    module = build(config)
    batches = fill(module)
    with pytest.raises(StoreFullError, match="raise the cap by at least"):
        module.close()
    with pytest.raises(StoreFullError):  # open still
        module.close()
    assert torch.equal(module.rows(torch.arange(ROWS)), expected(batches))
    module.set_ssd("16MiB")
    module.commit()
    for batch in batches[:3]:
        train(module, batch)
    module.close()
    with build(TierConfig(path=tmp_path / "s", hbm="1MiB", ssd="16MiB")) as module:
        assert torch.equal(module.rows(torch.arange(ROWS)), expected(batches + batches[:3]))


def test_training_goes_on_when_a_tagged_commit_is_dropped(tmp_path):
    module = build(TierConfig(path=tmp_path / "s", **CONFIG))
    batches = [torch.arange(first, first + 500) for first in range(0, 8000, 500)]
    for batch in batches:
        train(module, batch)
    best = module.commit(tag="best")
    for batch in batches[:]:
        train(module, batch)
        batches.append(batch)
    module.commit()
    batches += fill(module)
    with pytest.raises(StoreFullError, match=rf"commit {best} \(tag 'best'\) for .* MiB"):
        module.close()
    module.engine.drop_commit(best)
    module.close()
    with build(TierConfig(path=tmp_path / "s", **CONFIG)) as module:
        assert torch.equal(module.rows(torch.arange(ROWS)), expected(batches))


def test_what_does_not_fit_can_be_given_up(tmp_path):
    config = TierConfig(path=tmp_path / "s", **CONFIG)
    module = build(config)
    train(module, torch.arange(100))
    module.commit()
    fill(module)
    with pytest.raises(StoreFullError):
        module.close()
    module.close(commit=False)
    with pytest.raises(ClosedError):
        module.set_ssd("1GiB")
    module = build(config)
    assert torch.equal(module.rows(torch.arange(ROWS)), expected([torch.arange(100)]))
    module.close()


def test_engines_that_cannot_change_the_cap_say_so(tmp_path):
    in_memory = TierConfig(hbm="1MiB", ssd="1GiB", path=tmp_path / "s", engine="memory")
    for config, why in ((in_memory, "only when it is opened"), (TierConfig(hbm="all"), "no ssd tier")):
        with build(config) as module, pytest.raises(ConfigError, match=why):
            module.set_ssd("2GiB")


@pytest.mark.parametrize("engine", ["rocksdb", "lmdb"])
@pytest.mark.parametrize("fails", ["commit", "close"])
def test_tables_of_a_store_that_ended_can_be_closed(tmp_path, engine, fails, caplog):
    """These engines cannot go on after a failed change, so the tables are built again in the process."""
    config = TierConfig(path=tmp_path / "s", hbm="8MiB", ssd="1GiB", engine=engine)
    module = build(config)
    train(module, torch.arange(100))
    module.commit()
    train(module, torch.arange(10_000))
    with files_no_larger_than(4096), pytest.raises(StoreFullError):
        getattr(module, fails)()
    if fails == "commit":
        with pytest.raises(ClosedError, match="lost the rows written since its last commit"):
            module.close()
    assert module.engine.closed
    assert "10000 rows that changed since then are dropped" in caplog.text
    module.close()
    with build(config) as module:
        assert torch.equal(module.rows(torch.arange(ROWS)), expected([torch.arange(100)]))
