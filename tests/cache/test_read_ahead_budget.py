"""The memory for reading ahead: how much there is, and how it is divided between row layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bags import ROWS, SGD, Bags, budget, build, random_batches
from tierstore import ConfigError, TierConfig, _core
from tierstore.cache import opening
from tierstore.cache.opening import read_ahead_bytes
from tierstore.cache.tiers.read_ahead import bytes_per_row
from tierstore.pipeline import windows
from tierstore.pipeline.prefetch import prefetch
from tierstore.rounds import WINDOW_ROWS

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "tables", "bytes_"),
    [
        (64 * GIB, 4 * GIB, GIB // 2),  # an eighth of the tables
        (64 * GIB, 8 * GIB, GIB),
        (64 * GIB, 9 * GIB, GIB),  # a 64th of the memory
        (16 * GIB, 100 * GIB, GIB // 4),
        (256 * GIB, 31 * GIB, 31 * GIB // 8),
        (2048 * GIB, 1000 * GIB, 4 * GIB),
        (64 * GIB, 7, 0),
    ],
)
def test_automatic_bytes(memory: int, tables: int, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in (("memory_limit", "host_memory"), ("host_memory", "memory_limit")):
        monkeypatch.setattr(opening, name, lambda: memory)
        monkeypatch.setattr(opening, other, lambda: 1 << 50)
        assert read_ahead_bytes(TierConfig(), tables) == bytes_
    assert read_ahead_bytes(TierConfig(read_ahead="8GiB"), tables) == 8 * GIB
    assert read_ahead_bytes(TierConfig(read_ahead=0), tables) == 0


def opened(read_ahead: int | str, dims: tuple[int, ...] = (5, 60, 60), slots: int = 60) -> Bags:
    config = TierConfig(hbm=3 * budget(slots, dim=60), engine="memory", read_ahead=read_ahead)
    return build(config, SGD, dims)


def max_rows(module: Bags) -> dict[int, int]:
    """Rows that may be read ahead, by row size."""
    tiers: list[tuple[int, Any]] = [
        (group.layout.row_bytes, group.stack.tiers[-1]) for group in module.engine.groups
    ]
    return {row_bytes: tier.ahead.max_rows for row_bytes, tier in tiers}


@pytest.mark.parametrize("read_ahead", [100_000, "auto"])
def test_layouts_divide_the_bytes_by_their_tables_bytes(read_ahead: int | str) -> None:
    with opened(read_ahead) as module:
        small, large = SGD.row_bytes(5), SGD.row_bytes(60)
        every = ROWS * (small + 2 * large)
        bytes_ = every // 8 if read_ahead == "auto" else 100_000
        assert max_rows(module) == {
            small: int(bytes_ * ROWS * small // every / bytes_per_row(small)),
            large: int(bytes_ * ROWS * 2 * large // every / bytes_per_row(large)),
        }


def test_there_is_no_room_for_more_rows_than_the_tables_have() -> None:
    small, large = SGD.row_bytes(5), SGD.row_bytes(60)
    with build(
        TierConfig(hbm=3 * budget(60, dim=60), engine="memory", read_ahead="900TiB", overcommit=True),
        SGD,
        (5, 60, 60),
    ) as module:
        assert max_rows(module) == {small: ROWS, large: 2 * ROWS}


def test_a_refused_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        BYTES_PER_ROW = _core.HeldRows.BYTES_PER_ROW

        def __init__(self, capacity: int, row_bytes: int) -> None:
            raise _core.AddressSpaceError("the system refuses it")

    with opened(100_000) as module:
        ahead: Any = module.engine.groups[0].stack.tiers[-1]
        monkeypatch.setattr(_core, "HeldRows", Refused)
        with pytest.raises(ConfigError, match=r"read ahead of .* bytes: the system refuses it\. Lower"):
            ahead.ahead._held()


def test_zero_switches_reading_ahead_off() -> None:
    batches = random_batches(5, 40, 3, 6, 3)
    with opened(0) as module:
        assert all(group.stack.tiers[-1].ahead is None for group in module.engine.groups)
        assert all(group.stack.tiers[-1].window_rows == 0 for group in module.engine.groups)
        for ids in prefetch(batches, module, inputs={"": lambda batch: (batch,)}, depth=1, window=12):
            module(ids).sin().sum().backward()
        stats = module.engine.stats()
        assert stats["read_ahead_rows"] == stats["memory"]["read_ahead"] == 0
        assert stats["tiers"]["ssd"]["row_hits"] > 40


def test_tiers_that_hold_every_row_need_no_reading_ahead() -> None:
    with opened("auto", slots=ROWS + 10) as module:
        assert all(group.stack.tiers[-1].ahead is None for group in module.engine.groups)


def test_the_memory_is_counted_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = random_batches(5, 120, 3, 6, 3)
    with opened(100_000) as module:
        most = 0
        for ids in prefetch(batches, module, inputs={"": lambda batch: (batch,)}, depth=1, window=30):
            module(ids).sin().sum().backward()
            most = max(most, module.engine.stats()["memory"]["read_ahead"])
        assert 0 < most <= 100_000
        assert module.engine.stats()["memory"]["read_ahead"] < most // 4


def test_a_window_takes_what_the_rows_leave_that_it_asks_for() -> None:
    with opened(100_000) as module:
        ahead: Any = module.engine.groups[0].stack.tiers[-1].ahead
        each, most = bytes_per_row(SGD.row_bytes(5)), ahead.window_bytes(0)
        whole = ahead.max_rows
        asked = [int(share * 2 * most / each * WINDOW_ROWS) for share in (0.4, 0.6, 0.9, 1.1)]
        assert [round(ahead.window_bytes(rows) / most, 1) for rows in asked] == [1, 0.8, 0.2, 0]
        ahead.grant_window(most // 2)
        assert ahead.max_rows == pytest.approx(0.75 * whole, abs=1)
        ahead.grant_window(10 * most)
        assert ahead.max_rows == pytest.approx(0.5 * whole, abs=1)
        module.engine.groups[0].forget_window()
        assert ahead.max_rows == whole


@pytest.mark.parametrize("window", ["auto", 12])
def test_rows_and_window_share_the_bytes(window: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 0)
    batches = random_batches(5, 120, 3, 6, 3)
    with opened(100_000) as module:
        groups = module.engine.groups
        whole, lengths = max_rows(module), set()
        for _ in range(2):
            for ids in prefetch(batches, module, inputs={"": lambda batch: (batch,)}, depth=1, window=window):
                waiting = groups[0].window.lookups * sum(table.nbytes for table in ids)
                memory = module.engine.stats()["memory"]
                # Beside its rows the index of the window has room for some more, here a page's worth of it.
                assert waiting + memory["window"] + memory["read_ahead"] <= 100_000 + (16 << 10)
                lengths.add(groups[0].stats.prefetched[1])
                module(ids).sin().sum().backward()
        assert max_rows(module) == whole
    assert lengths == {12} if window == 12 else 1 < min(lengths) <= max(lengths) < min(lengths) + 9
