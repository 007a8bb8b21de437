"""Reading ahead in training: rows are there before their plans ask, and nothing else changes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.bags import ROWS, SGD, budget, build, everything, random_batches
from tierstore import TierConfig
from tierstore.pipeline.prefetch import prefetch


def test_plans_read_nothing_themselves_where_the_window_tells_everything() -> None:
    batches = random_batches(5, 80, 1, 6, 3)
    module = build(tiered(budget(60), "lookahead"), SGD, (8,))
    for ids in prefetch(iter(batches), module, inputs={"": lambda batch: (batch,)}, depth=1, window=20):
        module(ids).sin().sum().backward()
    stats = module.engine.stats()
    hits = stats["tiers"]["ssd"]["row_hits"]
    assert stats["read_ahead_rows"] > 0.7 * hits > 40
    module.engine.close()


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_training_takes_rows_that_were_read_ahead(policy: str) -> None:
    batches = random_batches(3, 60, 1, 6, 3)
    size = budget(60, policy=policy)
    modules = [build(config, SGD, (8,)) for config in (TierConfig(hbm="all"), tiered(size, policy))]
    inputs = {"": lambda batch: (batch,)}
    for module in modules:
        for ids in prefetch(iter(batches), module, inputs=inputs, depth=1, window=12):
            module(ids).sin().sum().backward()
    want, got = (everything(module) for module in modules)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    stats = modules[1].engine.stats()
    assert stats["read_ahead_rows"] > stats["tiers"]["ssd"]["row_hits"] // 3 > 0
    for module in modules:
        module.engine.close()


def test_a_store_is_asked_only_for_what_may_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TierConfig(hbm=budget(60), uvm=budget(ROWS), path=tmp_path / "rows")
    plain = TierConfig(hbm=config.hbm, uvm=config.uvm, ssd=0)
    batches, asked = random_batches(3, 40, 1, 6, 3), list[int]()
    modules = [build(tiers, SGD, (8,)) for tiers in (plain, config)]
    modules[1].engine.commit()  # a store that holds nothing
    read = modules[1].engine.store.read
    monkeypatch.setattr(
        modules[1].engine.store, "read", lambda keys, out: asked.append(len(keys)) or read(keys, out)
    )
    for module in modules:
        for ids in prefetch(iter(batches[:20]), module, inputs={"": lambda batch: (batch,)}, window=8):
            module(ids).sin().sum().backward()
    assert not asked
    modules[1].engine.close()
    modules[1] = build(config, SGD, (8,))
    for module in modules:
        for ids in prefetch(iter(batches[20:]), module, inputs={"": lambda batch: (batch,)}, window=8):
            module(ids).sin().sum().backward()
    assert modules[1].engine.stats()["tiers"]["ssd"]["row_hits"] > 20
    want, got = (everything(module) for module in modules)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    for module in modules:
        module.engine.close()


def tiered(size: int, policy: str) -> TierConfig:
    return TierConfig(hbm=size, engine="memory", policy=policy)


def test_tables_that_nobody_holds_are_freed() -> None:
    module = build(tiered(budget(60), "lookahead"), SGD, (8,))
    for ids in prefetch(
        random_batches(3, 30, 1, 6, 3), module, inputs={"": lambda b: (b,)}, depth=1, window=8
    ):
        module(ids).sin().sum().backward()
    group = weakref.ref(module.engine.groups[0])
    module.engine.close()
    del module, ids
    gc.collect()
    assert group() is None
