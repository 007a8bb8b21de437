"""The bytes of automatic reading ahead: where they come from, and that nothing but batches decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cache_policies import prepare, simulate
from cache_policies.live import LiveCurves, starts_of
from tests.bags import ROWS, SGD, Bags, budget, build, everything, train
from tierstore import TierConfig
from tierstore.cache import opening, read_ahead_size
from tierstore.cache.read_ahead_size import Bytes, KnownAhead, ReadAheadSize
from tierstore.keys import make_keys
from tierstore.pipeline import windows
from tierstore.pipeline.prefetch import prefetch
from tierstore.rounds import best_size

ALONE: dict[str, Any] = {"inputs": {"": lambda batch: (batch,)}, "depth": 1}
RANDOM = np.random.default_rng(1)
BATCHES = [
    [torch.from_numpy((ROWS * RANDOM.random((6, 4)) ** power).astype(np.int64)) for power in (1, 3)]
    for _ in range(260)
]


class Window:
    lookups, distinct_rows = 20, 4000


class Group:
    name, window = "dim8", Window()

    def __init__(self, *tables: np.ndarray) -> None:
        """Tables whose batches look up rows of each array."""
        self.curves = LiveCurves(range(len(tables)))
        for batch in zip(*tables, strict=True):
            keys = np.concatenate([make_keys(table, np.unique(ids)) for table, ids in enumerate(batch)])
            self.curves.observe(keys, starts_of(np.ones(len(keys))))


def chooser(slots: int, most: int = 1 << 20, rows: int = 20_000) -> ReadAheadSize:
    size = ReadAheadSize([(0, rows)], slots, Bytes(most, 300.0, 330.0, 288))
    size.known = KnownAhead(None, 8000.0, 1 << 20)
    return size


def tell(size: ReadAheadSize, group: Any, lookups: int, lacked: int) -> list[int]:
    """The lookups at which the size has changed."""
    return [n for n in range(1, lookups + 1) if size.lookup_done(group, lacked)]


UNIFORM = np.random.default_rng(2).integers(0, 20_000, (400, 250))


def test_rows_that_memory_would_hold_need_little_reading_ahead() -> None:
    """With 3,400 slots more no row would be lacking."""
    size = chooser(slots=17_500)
    assert tell(size, Group(UNIFORM), 64, 30) == [64]
    assert size.now <= 1 << 19
    assert size.split is not None
    assert size.split <= 1 << 19


def test_the_log_says_what_a_memory_tier_would_make_more_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody gives the bytes to the tier, so they go on serving reading ahead."""
    monkeypatch.setattr(ReadAheadSize, "_choose", lambda *_: (1 << 20, 1 << 18))
    size = chooser(slots=500)
    with caplog.at_level(logging.INFO, "tierstore"):
        assert tell(size, Group(UNIFORM), 300, 30) == []
    assert size.now == 1 << 20
    (said,) = [record.getMessage() for record in caplog.records]  # once
    assert "if rows read ahead had 256 KiB and a memory tier 768 KiB more: give the tier (hbm or uvm)" in said


def test_rows_that_memory_would_not_hold_are_read_ahead(caplog: pytest.LogCaptureFixture) -> None:
    size = chooser(slots=500)
    with caplog.at_level(logging.INFO, "tierstore"):
        assert tell(size, Group(UNIFORM), 2000, 240) == []
    assert size.now == size.split == 1 << 20
    assert not caplog.records


def test_bytes_that_bring_nothing_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows so far apart that no request brings two of them."""
    monkeypatch.setattr(read_ahead_size, "FILE_BYTES", 1e6)
    size = chooser(slots=500)
    assert tell(size, Group(UNIFORM), 64, 240) == [64]
    assert size.now == (1 << 20) // 32


@pytest.mark.parametrize("lookups", [63, 64, 65])
def test_sizes_are_chosen_after_stated_lookups(lookups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[int] = []
    size, group, done = chooser(slots=500), Group(UNIFORM), [0]
    monkeypatch.setattr(ReadAheadSize, "_choose", lambda *_: points.append(done[0]) or (1 << 19, 1 << 19))
    for done[0] in range(1, 3 * 1024 + lookups):
        size.lookup_done(group, 10)  # type: ignore[arg-type]
    assert points == [64, 128, 256, 512, 1024, 2048, 3072]
    assert lookups < 1024


def test_a_group_without_a_window_or_misses_keeps_its_bytes() -> None:
    size = chooser(slots=17_500)
    assert not tell(size, Group(UNIFORM), 64, 0)
    size.known = None
    assert not tell(size, Group(UNIFORM), 64, 30)


def test_a_size_stays_where_another_one_saves_next_to_nothing() -> None:
    costs = {1024: 100.0, 724: 99.0}
    assert best_size(1024, lambda size: costs.get(int(size), 101.0)) == 724
    assert best_size(1024, lambda size: costs.get(int(size), 101.0), 1024) == 1024
    assert best_size(1024, lambda size: 5.0) == 32  # of equals the least
    costs = {1024: 100.0, 724: 101.9, 512: 102.1}
    assert best_size(1024, lambda size: costs.get(int(size), 200.0)) == 724
    assert best_size(0, lambda size: 5.0) == 0


def test_tables_that_share_a_memory_miss_together_as_lru_does() -> None:
    random = np.random.default_rng(3)
    skewed = (20_000 * random.random((400, 250)) ** 3).astype(np.int64)
    group = Group(UNIFORM, skewed)
    sizes, misses = read_ahead_size.joint_curve(group.curves, [(0, 20_000), (1, 20_000)])
    trace = prepare(
        [
            np.concatenate([make_keys(0, one), make_keys(1, other)])
            for one, other in zip(UNIFORM, skewed, strict=True)
        ]
    )
    for slots in (2000, 8000, 16_000):
        want = simulate(trace, "lru", slots).misses / 400
        assert np.interp(slots, sizes, misses) == pytest.approx(want, rel=0.08)


# -- in training ----------------------------------------------------------------------------------


def opened(read_ahead: int | str = "auto", uvm: int = 0, slots: int = 900) -> Bags:
    config = TierConfig(hbm=budget(slots, dim=8), uvm=uvm, engine="memory", read_ahead=read_ahead)
    return build(config, SGD, (8, 8))


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading ahead have as many bytes as the tables, choose early, and let rows lie so far apart that
    no request brings two of them."""
    monkeypatch.setattr(opening, "_READ_AHEAD_SHARE", 1)
    monkeypatch.setattr(read_ahead_size, "_FIRST", 16)
    monkeypatch.setattr(read_ahead_size, "FILE_BYTES", 1e6)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 4000)


def slowly(batches: Any) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        time.sleep(0.001 * (number % 7 == 0))
        yield batch


def limit(module: Bags) -> int:
    (figures,) = module.engine.stats()["groups"].values()
    return figures["read_ahead_limit"]


def test_training_chooses_the_same_sizes_and_bits_however_fast_it_is(
    early: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = []
    for loader in (BATCHES, slowly(BATCHES)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "tierstore"), opened() as module:
            most, limits = limit(module), []
            assert most == module.engine.groups[0].size.now  # type: ignore[union-attr]
            got = []
            for ids in prefetch(loader, module, **ALONE):
                out = module(ids)
                out.sin().sum().backward()
                got.append(out.detach())
                limits.append(limit(module))
                assert 0 < limits[-1] <= most
            said = [r.getMessage() for r in caplog.records if "rows read ahead may take" in r.getMessage()]
            runs.append(
                (said, limits[-1], module.engine.stats()["tiers"], torch.stack(got), everything(module))
            )
    assert runs[0][:3] == runs[1][:3]
    assert len(runs[0][0]) >= 1
    with build(TierConfig(hbm="all"), SGD, (8, 8)) as memory:
        want = []
        for ids in BATCHES:
            out = memory(ids)
            out.sin().sum().backward()
            want.append(out.detach())
        for run in runs:
            assert torch.equal(run[3], torch.stack(want))
            assert all(torch.equal(a, b) for a, b in zip(run[4], everything(memory), strict=True))


def test_choices_are_those_of_the_rule_on_the_batches_alone(
    early: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is counted while training is fed to another chooser, with curves made afterwards."""
    seen: list[tuple[int, int, int, KnownAhead | None, int]] = []
    done = ReadAheadSize.lookup_done

    def noted(size: ReadAheadSize, group: Any, lacked: int) -> bool:
        known = size.known
        changed = done(size, group, lacked)
        seen.append((lacked, group.window.lookups, group.window.distinct_rows, known, size.now))
        return changed

    monkeypatch.setattr(ReadAheadSize, "lookup_done", noted)
    with opened() as module:
        train(module, prefetch(BATCHES, module, **ALONE))  # type: ignore[arg-type]
        live = module.engine.groups[0].size
    monkeypatch.setattr(ReadAheadSize, "lookup_done", done)
    assert live is not None
    again = ReadAheadSize(live._tables, live.slots, live._bytes)
    group: Any = Group()
    group.curves = LiveCurves([0, 1])
    for ids, (lacked, lookups, distinct, known, now) in zip(BATCHES, seen, strict=True):
        keys = [
            np.unique(make_keys(table, part.numpy().reshape(-1)), return_index=True, return_counts=True)
            for table, part in enumerate(ids)
        ]
        for unique, first, _ in keys:
            assert len(unique) == len(first)
        order = [np.argsort(first) for _, first, _ in keys]
        group.curves.observe(
            np.concatenate([unique[by] for (unique, _, _), by in zip(keys, order, strict=True)]),
            starts_of(np.concatenate([count[by] for (_, _, count), by in zip(keys, order, strict=True)])),
        )
        group.window.lookups, group.window.distinct_rows, again.known = lookups, distinct, known
        again.lookup_done(group, lacked)
        assert again.now == now
    assert len({now for *_, now in seen}) > 1


def test_bytes_that_are_given_are_kept() -> None:
    with opened(read_ahead=10_000) as module:
        train(module, prefetch(BATCHES, module, **ALONE))  # type: ignore[arg-type]
        assert module.engine.groups[0].size is None
        assert limit(module) == 10_000
    with opened(read_ahead=0) as module:
        assert limit(module) == 0


def test_the_bytes_of_uvm_are_never_taken() -> None:
    with opened(uvm=40_000) as module:
        tier: Any = module.engine.groups[0].stack.exclusive[-1]
        slots = tier.capacity
        train(module, prefetch(BATCHES, module, **ALONE))  # type: ignore[arg-type]
        assert (tier.capacity, len(tier)) == (slots, slots)
