"""What the planner says about reads from the SSD: neighbours in one read, batches read ahead together."""

from __future__ import annotations

import numpy as np
import pytest

from tests.planner.machines import table, topology
from tierstore import _core
from tierstore.cache.engine import READ_AHEAD_BYTES as RUNTIME_READ_AHEAD
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
from tierstore.planner.costs import HELD_BYTES_PER_ROW, MERGED_READ_BYTES, READ_AHEAD_BYTES, read_bytes
from tierstore.planner.reading import read_seconds

BLOCK, RECORD = 4096, 292
CURVE = [(BLOCK, 60e3), (MERGED_READ_BYTES, 25e3)]


def machine(**changes: object) -> Topology:
    sizes = {"hbm_per_rank": "16MiB", "host_memory_per_host": "256MiB", "ssd_per_host": "10GiB"}
    return topology(1, 1, **{**sizes, "device": "cpu", "ssd_read_curve": CURVE, **changes})


def merged(places: np.ndarray, gap: float) -> tuple[int, int]:
    """Reads, and their bytes, of records at ``places`` in order, as csrc/store/read.cc puts them together."""
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


def test_rows_that_lie_close_to_one_another_share_reads():
    # Host memory for little more than the store's index.
    machines = [machine(host_memory_per_host=rows * 12 + (70 << 20)) for rows in (1 << 20, 1 << 24)]
    near, far = (solved(1 << k, 1 << 14, m) for k, m in zip((20, 24), machines, strict=True))
    assert near.rows_per_read > 1.3
    assert far.rows_per_read < 1.1
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
