"""What the planner says about reads from the SSD: neighbours in one read, batches read ahead together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.planner.machines import table, topology
from tierstore import _core
from tierstore.cache.engine import READ_AHEAD_BYTES as RUNTIME_READ_AHEAD
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
from tierstore.planner.costs import HELD_BYTES_PER_ROW, MERGED_READ_BYTES, READ_AHEAD_BYTES, read_bytes
from tierstore.planner.curves import MissCurve
from tierstore.planner.reading import call_seconds, read_seconds

BLOCK, RECORD = 4096, 292
CURVE = [(BLOCK, 60e3), (MERGED_READ_BYTES, 25e3)]


def machine(**changes: object) -> Topology:
    sizes = {"hbm_per_rank": "16MiB", "host_memory_per_host": "256MiB", "ssd_per_host": "10GiB"}
    return topology(1, 1, **{**sizes, "device": "cpu", "ssd_read_curve": CURVE, **changes})


def merged(places: np.ndarray, gap: float) -> tuple[int, int]:
    """Reads, and their bytes, of records at ``places`` in order, as csrc/store/reader.cc joins them."""
    reads, size, start, end = 0, 0, 0, -1
    for begin in (places // BLOCK * BLOCK).tolist():
        if end >= 0 and begin <= end + gap and begin + BLOCK - start <= MERGED_READ_BYTES:
            end = max(end, begin + BLOCK)
            continue
        reads, size, start, end = reads + 1, size + end - start if end >= 0 else 0, begin, begin + BLOCK
    return reads, size + end - start


def test_the_constants_are_the_runtimes():
    assert READ_AHEAD_BYTES == RUNTIME_READ_AHEAD
    assert pytest.approx(_core.HeldRows.BYTES_PER_ROW) == HELD_BYTES_PER_ROW


@pytest.mark.parametrize("rows", [100, 1000, 5000, 20_000])
def test_a_call_costs_what_its_merged_reads_cost(rows):
    stored, machines = 100 << 20, machine()
    per_byte = (1 / 25e3 - 1 / 60e3) / (MERGED_READ_BYTES - BLOCK)
    each = 1 / 60e3 - per_byte * BLOCK
    record = 292 - 292 % 8  # 14 of them fill a block
    assert read_bytes(record) == BLOCK
    gap = min(each / per_byte, MERGED_READ_BYTES - BLOCK)
    places = np.sort(np.random.default_rng(rows).integers(0, stored // RECORD, rows)) * RECORD
    reads, size = merged(places, gap)
    predicted = read_seconds(machines, rows, record, stored)
    assert predicted == pytest.approx(reads * each + size * per_byte, rel=0.1)
    assert predicted <= rows / 60e3 * (1 + 1e-9)


def solved(rows: int, batch_size: int, machines: Topology, **changes: object) -> Workload:
    work = Workload(batch_size, window=8, **changes)
    planner = EmbeddingShardingPlanner(machines, workload=work, search_seconds=0.1)
    solution = planner.solve([table(rows=rows, dim=64)])
    assert not solution.caches.missing
    return solution.work


class Log:
    """A log of rows in segments, of which compaction takes those with the fewest live rows while more
    records are superseded than live, as csrc/store/victims.cc does."""

    SLOTS = 1024

    def __init__(self) -> None:
        self.segments: list[list[int]] = []
        self.active: dict[bool, int] = {}
        self.place: dict[int, tuple[int, int]] = {}
        self.live: list[int] = []
        self.records = 0

    def append(self, row: int, relocated: bool = False) -> None:
        if row in self.place:
            self.live[self.place[row][0]] -= 1
        at = self.active.get(relocated)
        if at is None or len(self.segments[at]) == self.SLOTS:
            at = self.active[relocated] = len(self.segments)
            self.segments.append([])
            self.live.append(0)
        self.place[row] = at, len(self.segments[at])
        self.segments[at].append(row)
        self.live[at] += 1
        self.records += 1

    def compact(self) -> None:
        while self.records > 2 * len(self.place):
            sealed = [i for i, rows in enumerate(self.segments) if len(rows) == self.SLOTS]
            victim = min(sealed, key=lambda i: self.live[i])
            rows, self.segments[victim] = self.segments[victim], []
            for slot, row in enumerate(rows):
                if self.place[row] == (victim, slot):
                    self.append(row, relocated=True)
            self.records -= self.SLOTS

    def places(self, rows: list[int]) -> np.ndarray:
        """Bytes from the beginning, in order; segments are files of their own, too far apart to merge."""
        at = np.array([self.place[row] for row in rows])
        return np.sort(at[:, 0] * (1 << 30) + at[:, 1] * RECORD)


def lru(batches: list[list[int]], held: int) -> Iterator[tuple[list[int], list[int]]]:
    """Per batch: rows that a memory of ``held`` rows lacks, and those that leave it."""
    memory: OrderedDict[int, None] = OrderedDict()
    for batch in batches:
        lacking = [row for row in batch if row not in memory]
        for row in batch:
            memory[row] = None
            memory.move_to_end(row)
        yield lacking, [memory.popitem(last=False)[0] for _ in range(len(memory) - held)]


def test_a_call_costs_what_it_does_in_a_log_of_rows_that_left_memory():
    rows, held, steps, together = 24_000, 4_000, 240, 2
    random = np.random.default_rng(0)
    weights = (np.arange(rows) + 20.0) ** -1.0
    drawn = random.choice(rows, (steps, 2_000), p=weights / weights.sum())
    batches = [np.unique(ids).tolist() for ids in drawn]
    unique = float(np.mean([len(batch) for batch in batches]))
    sizes = [2_000, 3_000, 4_000, 5_500, 7_500, 10_000, 13_000, 17_000]
    misses = [np.mean([len(lacking) for lacking, _ in lru(batches, n)][steps // 2 :]) / unique for n in sizes]
    curve = MissCurve.through(sizes, misses, rows)
    machines = machine()
    per_byte = (1 / 25e3 - 1 / 60e3) / (MERGED_READ_BYTES - BLOCK)
    each = 1 / 60e3 - per_byte * BLOCK

    log, calls, call = Log(), list[float](), list[int]()
    for row in range(rows):
        log.append(row)
    for step, (lacking, leaving) in enumerate(lru(batches, held)):
        call += lacking
        if step % together == 1:
            reads, size = merged(log.places(call), min(each / per_byte, MERGED_READ_BYTES - BLOCK))
            calls.append(reads * each + size * per_byte)
            call = []
        for row in leaving:
            log.append(row)
        log.compact()
    measured = float(np.mean(calls[len(calls) // 2 :]))

    planner = EmbeddingShardingPlanner(machines, batch_size=16, search_seconds=0.1)
    caches = planner.solve([table(rows=rows)]).caches
    cost = replace(caches.costs[0], curve=curve, unique=unique)
    caches = replace(caches, costs=[cost], memory_rows=np.array([float(held)]))
    lacked = unique * curve.at(held) * together
    predicted = call_seconds(machines, caches, np.array([0]), lacked, RECORD, files=2.0)
    uniform = read_seconds(machines, lacked, RECORD, 2.0 * RECORD * rows)
    assert predicted == pytest.approx(measured, rel=0.1)
    assert uniform > 1.15 * measured


def test_rows_that_lie_close_to_one_another_share_reads():
    # Host memory for little more than the store's index.
    machines = [machine(host_memory_per_host=rows * 12 + (70 << 20)) for rows in (1 << 20, 1 << 24)]
    near, far = (solved(1 << k, 1 << 14, m) for k, m in zip((20, 24), machines, strict=True))
    assert near.rows_per_read > 1.3 * far.rows_per_read
    assert 1 < far.rows_per_read < 1.3  # those that left last lie together, however many there are
    assert near.read_waits == far.read_waits == 0
    assert solved(1 << 20, 1 << 14, machines[0], rows_per_read=1.0).rows_per_read == 1.0


def test_batches_too_large_to_be_read_ahead_make_plans_wait():
    many = machine(hbm_per_rank="256MiB")
    assert solved(1 << 22, 1 << 18, many).read_waits == 1


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"hbm_per_rank": "4GiB"}, 1),
        ({"host_memory_per_host": "4GiB"}, 11),
        ({"host_memory_per_host": "96MiB"}, 111),
    ],
)
def test_evicting_and_reading_ahead_cost_each_row_size_that_does_so_once(changes, seconds):
    costs = {"lookup": 1.0, "evict": 10.0, "ahead": 100.0}
    machines = machine(row_size_seconds=costs, **changes)
    planner = EmbeddingShardingPlanner(machines, batch_size=64, search_seconds=0.1)
    tables = [table(f"t{i}", 500_000, dim) for i, dim in enumerate((64, 64, 32))]
    solution = planner.solve(tables)
    index = solution.prediction.ranks[0, 1]
    assert index == pytest.approx(2 * seconds, rel=0.01)


def test_elsewhere_than_on_the_cpu_nothing_is_known():
    work = solved(1 << 20, 1 << 14, machine(device="cuda", host_memory_per_host="82MiB"))
    assert work.rows_per_read is None
    assert work.read_waits == 0
