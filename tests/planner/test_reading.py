"""What the planner says about reads from the SSD: neighbours in one read, batches read ahead together."""

from __future__ import annotations

import numpy as np
import pytest

from tests.planner.machines import table, topology
from tierstore import _core
from tierstore.cache.opening import READ_AHEAD_BYTES as RUNTIME_READ_AHEAD
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
from tierstore.planner.costs import HELD_BYTES_PER_ROW, READ_AHEAD_BYTES, read_bytes
from tierstore.planner.reading import MERGED_READ_BYTES, read_seconds

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


def drives(rows: int, batch_size: int, machines: Topology, **changes: object) -> float:
    """Seconds of the drives per step."""
    work = Workload(batch_size, window=8, **changes)
    planner = EmbeddingShardingPlanner(machines, workload=work, search_seconds=0.1)
    solution = planner.solve([table(rows=rows, dim=64)])
    assert not solution.caches.missing
    return float(solution.prediction.ssd_s[0])


def test_rows_that_lie_close_to_one_another_share_reads():
    # Host memory for little more than the store's index.
    machines = [machine(host_memory_per_host=rows * 12 + (70 << 20)) for rows in (1 << 20, 1 << 24)]
    near, far = (
        drives(1 << k, 1 << 14, m, rows_per_read=1.0) / drives(1 << k, 1 << 14, m)
        for k, m in zip((20, 24), machines, strict=True)
    )
    assert near > 1.3 * far
    assert 1 <= far < 1.3


def test_elsewhere_than_on_the_cpu_nothing_is_known():
    machines = machine(device="cuda", host_memory_per_host="82MiB")
    assert drives(1 << 20, 1 << 14, machines) == drives(1 << 20, 1 << 14, machines, rows_per_read=1.0) > 0
