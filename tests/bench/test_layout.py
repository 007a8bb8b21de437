"""The parts of ``bench.research.layout``: logs so small that their requests are counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from bench.research import layout, layout_reading, main
from bench.research.layout_log import BLOCK, Geometry, Log, merged
from bench.research.layout_trace import NEVER, Ahead, Memory, Plan, automatic, plans
from cache_policies import prepare, simulate
from tierstore.cache.tiers import read_ahead
from tierstore.rounds import MERGED_READ_BYTES

GEOMETRY = Geometry.of(272)
NO_CAP = 1e9


def blocks(*numbers: int) -> tuple[np.ndarray, np.ndarray]:
    begins = np.array(numbers, np.int64) * BLOCK
    return begins, begins + BLOCK


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_records_lie_as_in_the_store() -> None:
    assert (GEOMETRY.record, GEOMETRY.frame, GEOMETRY.per_frame) == (288, BLOCK, 14)
    assert GEOMETRY.offsets(np.array([0, 13, 14])).tolist() == [BLOCK, BLOCK + 13 * 288, 2 * BLOCK]
    assert Geometry.of(1040).frame == 8 * BLOCK  # smaller frames would waste more than 2 %
    assert GEOMETRY.segment_slots(1e12) == (1 << 17) // 14 * 14


def test_requests_go_on_over_gaps_and_end_at_64_kib() -> None:
    assert merged(*blocks(), 0) == (0, 0)
    assert merged(*blocks(3), 0) == (1, BLOCK)
    assert merged(*blocks(3, 3, 4), 0) == (1, 2 * BLOCK)
    assert merged(*blocks(3, 5), BLOCK) == (1, 3 * BLOCK)
    assert merged(*blocks(3, 5), BLOCK - 1) == (2, 2 * BLOCK)
    whole = MERGED_READ_BYTES // BLOCK
    assert merged(*blocks(*range(whole)), 0) == (1, MERGED_READ_BYTES)
    assert merged(*blocks(*range(whole + 1)), 0) == (2, MERGED_READ_BYTES + BLOCK)


def log_of(count: int, cap: float = NO_CAP) -> Log:
    return Log(count, GEOMETRY, cap, gap=2 * BLOCK)


def test_a_read_counts_its_requests() -> None:
    log = log_of(300_000)
    log.read(rows(15, 0, 3))  # two neighbouring blocks
    assert (log.counts.requests, log.counts.bytes, log.counts.read) == (1, 2 * BLOCK, 3)
    log.read(rows(0, 4 * 14))  # three blocks lie between these
    assert (log.counts.requests, log.counts.bytes) == (3, 4 * BLOCK)
    log.read(rows(log.slots - 1, log.slots))  # no request goes into another file
    assert log.counts.requests == 5
    log.read(rows(299_999))  # its chunk is in memory
    assert log.counts.requests == 5


def check(log: Log) -> None:
    """Every row lies at one place, which knows it; the log counts what is live."""
    assert (log.row_at[log.place] == np.arange(len(log.place))).all()
    assert (log.row_at >= 0).sum() == len(log.place)


def test_rows_that_are_written_again_lie_together() -> None:
    log = log_of(300_000)
    again = np.arange(0, 200_000, 100, dtype=np.int32)
    log.append(again)
    check(log)
    assert (np.diff(log.place[again]) == 1).all()
    assert log.counts.written == len(again)


@pytest.mark.parametrize("key", [None, "row"])
def test_compaction_keeps_every_row_and_leaves_what_is_tolerated(key: str | None) -> None:
    log, random = log_of(20_000, cap=1.33), np.random.default_rng(1)
    log.copy_key = None if key is None else lambda found: found.astype(np.int64)
    segments = []
    for _ in range(100):
        log.append(random.choice(20_000, 1000, replace=False).astype(np.int32))
        log.compact()
        segments.append(log.used // log.slots)
        for found, old in log.moved:
            assert len(found) == len(old)
            if key is not None:
                by_place = found[np.argsort(log.place[found])]
                assert (np.diff(by_place) < 0).sum() <= 2  # where a segment was full
        log.moved.clear()
        check(log)
    # Tolerated are a quarter and two segments; two more are open, and a call comes before compaction.
    assert log.used - 20_000 <= 20_000 / 4 + 4 * log.slots + 1000
    assert max(segments[50:]) == segments[50]  # steady
    assert log.counts.copied > 0


def drawn(count: int, rows_: int = 2000, batch: int = 50, tail: int = 0) -> Any:
    """Batches of rows by Zipf's law, and then ``tail`` batches of a new row each."""
    random = np.random.default_rng(2)
    weights = 1 / np.arange(1, rows_ + 1)
    batches = [random.choice(rows_, batch, p=weights / weights.sum()) for _ in range(count)]
    return prepare([*batches, *(np.array([rows_ + i]) for i in range(tail))])


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_misses_are_the_simulators(policy: str) -> None:
    window = 8
    prepared = drawn(400, tail=window)
    moves = list(plans(prepared, 2000 + window, 300, window, policy))
    assert len(moves) == 400
    simulated = simulate(prepared, policy, 300, depth=2, window=window)
    assert simulated.misses == sum(len(plan.misses) for plan in moves) + window
    resident: set[int] = set()
    for plan in moves:
        assert resident.isdisjoint(plan.misses.tolist())
        resident |= set(plan.misses.tolist())
        assert resident >= set(plan.victims.tolist())
        resident -= set(plan.victims.tolist())
        assert len(resident) <= 300


def test_rows_without_a_slot_leave_after_their_batch() -> None:
    memory = Memory(100, 10, "lookahead")
    missing, victims, next_use, _ = memory.plan(np.arange(14, dtype=np.int32), np.full(14, 5), 0)
    assert (missing.tolist(), victims.tolist()) == (list(range(14)), [10, 11, 12, 13])
    assert next_use.tolist() == [5] * 4


def test_the_window_ends_where_its_rows_have_no_room() -> None:
    prepared = drawn(300)
    few = automatic(prepared, 50, 272, 300, read_ahead=50_000)
    many = automatic(prepared, 50, 272, 300, read_ahead=300_000)
    assert few.window[0] < many.window[0]
    assert (few.room == int(50_000 / read_ahead.bytes_per_row(272))).all()


def test_the_constants_are_the_runtimes() -> None:
    for name in ("RESERVE", "PARTS", "MOST_AT_ONCE", "LEFT_TO_PLANS"):
        assert getattr(layout_reading, name) == getattr(read_ahead, f"_{name}")


def training(name: str, count: int = 300, cap: float = 1.33) -> tuple[layout.Training, list[Plan]]:
    prepared = drawn(count + 20, rows_=20_000, batch=500)
    moves = list(islice(plans(prepared, 20_000, 1500, 20, "lookahead"), count))
    log = log_of(20_000, cap)
    popularity = np.arange(20_000)
    return layout.Training(
        log, layout.LAYOUTS[name], Ahead(20, 4000), layout.Knowledge(20_000, popularity)
    ), moves


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_every_miss_is_read_once_and_every_victim_is_written(name: str) -> None:
    trained, moves = training(name)
    log, reading = trained.log, trained.reading
    missed = kept = 0
    for seq, plan in enumerate(moves):
        before = reading.held.sum()
        read = log.counts.read
        trained.step(seq, plan)
        missed += len(plan.misses)
        # What waits has come from the log or was kept; what was missed waits no more.
        kept += int(reading.held.sum() - before) + len(plan.misses) - (log.counts.read - read)
        assert not reading.held[plan.misses].any() or len(np.intersect1d(plan.misses, plan.victims))
    check(log)
    assert missed + reading.held.sum() == log.counts.read + kept
    wanted_soon = sum(int((plan.next_use < NEVER).sum()) for plan in moves)
    unwritten = sum(len(part) for part in trained._leaving)
    assert 0 <= kept <= wanted_soon + 16 * 500 * (layout.LAYOUTS[name].plans > 1)
    assert log.counts.written + unwritten <= sum(len(plan.victims) for plan in moves)
    if layout.LAYOUTS[name].plans == 1:
        assert log.counts.written == sum(len(plan.victims) for plan in moves)
    assert reading.read_by_plans < missed / 4


def test_the_order_of_victims_is_the_layouts() -> None:
    trained, moves = training("row", 40)
    for seq, plan in enumerate(moves):
        trained.step(seq, plan)
        if len(plan.victims):
            assert (np.diff(plan.victims) < 0).any()
            places = trained.log.place[np.sort(plan.victims)]
            assert (np.diff(places) == 1).sum() >= len(places) - 2


def test_a_plan_without_reading_ahead_reads_for_itself() -> None:
    trained, moves = training("today", 40)
    trained.reading.max_rows = 0
    for seq, plan in enumerate(moves):
        trained.step(seq, replace(plan, announced=[]))
    assert trained.log.counts.read == sum(len(plan.misses) for plan in moves) == trained.reading.read_by_plans


def test_the_command_compares_with_today(tmp_path, capsys) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "--data",
        "synthetic:zipf:0.8",
        "--rows=4000",
        "--tables=2",
        "--batch-size=32",
        "--warm-up=60",
    ]
    arguments += ["--plans=20", "--hbm=1/10", "--layouts=today;row", "--json", str(out)]
    assert main(None, layout.add_arguments, layout.run, arguments) == 0
    result = json.loads(out.read_text())
    (case,) = result["cases"].values()
    assert list(case["layouts"]) == ["today", "row"]
    today = case["layouts"]["today"]
    assert today["requests"] > 0
    assert today["bytes"] >= today["requests"] * BLOCK
    assert today["write_amplification"] >= 1
    assert "today" in capsys.readouterr().out
