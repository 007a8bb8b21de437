"""What the planner says about reads from the SSD: neighbours in one read, batches read ahead together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.planner.machines import table, topology
from tierstore import rounds
from tierstore.cache import opening
from tierstore.cache.tiers import read_ahead
from tierstore.optim import SGD, RowWiseAdagrad
from tierstore.pipeline import windows
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload, costs
from tierstore.planner.costs import Problem
from tierstore.planner.curves import Popularity
from tierstore.rounds import (
    MERGED_READ_BYTES,
    batch_cost,
    merged_reads,
    read_bytes,
    record_bytes,
    round_batches,
)

BLOCK, RECORD = 4096, 292
GAP = 8 << 10  # of the store as long as it has not measured its device
ROWS, DIM, BATCH, ROOM, WARM, STEPS = 100_000, 64, 256, 2000, 150, 250
SIZE = 4 * DIM
DRIVES = {"ssd_read_iops": 60e3, "ssd_bw": 25e3 * MERGED_READ_BYTES}


def machine(**changes: object) -> Topology:
    sizes = {"hbm_per_rank": "16MiB", "host_memory_per_host": "256MiB", "ssd_per_host": "10GiB"}
    return topology(1, 1, **{**sizes, "device": "cpu", **DRIVES, **changes})


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
    assert pytest.approx(read_ahead.bytes_per_row(256)) == 256 + costs.HELD_BYTES_PER_ROW
    assert costs.READ_AHEAD_SHARE == opening._READ_AHEAD_SHARE
    assert costs.READ_AHEAD_OF_MEMORY == opening._READ_AHEAD_OF_MEMORY
    assert costs.READ_AHEAD_AT_MOST == opening._READ_AHEAD_AT_MOST


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
    predicted = batch_cost(rows, 1, rows, record, stored, machines.read_cost)
    assert predicted == pytest.approx(reads * each + size * per_byte, rel=0.1)
    assert predicted <= rows / 60e3 * (1 + 1e-9)


def drives(rows: int, batch_size: int, machines: Topology, **changes: object) -> float:
    """Seconds of the drives per step."""
    work = Workload(batch_size, **{"window": 8, **changes})
    planner = EmbeddingShardingPlanner(machines, workload=work, search_seconds=0.1)
    solution = planner.solve([table(rows=rows, dim=64)])
    assert not solution.caches.missing
    return float(solution.prediction.ssd_s[0])


def test_rows_that_lie_close_to_one_another_share_reads():
    # Host memory for little more than the store's index.
    machines = [machine(host_memory_per_host=rows * 12 + (70 << 20)) for rows in (1 << 20, 1 << 24)]
    near, far = (
        drives(1 << k, 1 << 14, m, rows_per_read=1.0) / drives(1 << k, 1 << 14, m, read_ahead=8 << 20)
        for k, m in zip((20, 24), machines, strict=True)
    )
    assert near > 1.3 * far
    assert 1 <= far < 1.3


def test_elsewhere_than_on_the_cpu_nothing_is_known():
    machines = machine(device="cuda", host_memory_per_host="82MiB")
    assert drives(1 << 20, 1 << 14, machines) == drives(1 << 20, 1 << 14, machines, rows_per_read=1.0) > 0


def config_of(rows: int) -> tierstore.EmbeddingBagConfig:
    return tierstore.EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=rows, feature_names=["t"])


def batches(exponent: float) -> Iterator[tierstore.KeyedJaggedTensor]:
    """Batches of ids with P(k-th row) ~ (k + 10)^-exponent; the ranks of the rows are random."""
    random = np.random.default_rng(1)
    weights = (np.arange(ROWS) + 11.0) ** -exponent
    ids, chances = random.permutation(ROWS), weights / weights.sum()
    for _ in range(WARM + STEPS):
        drawn = torch.from_numpy(ids[random.choice(ROWS, BATCH, p=chances)])
        yield tierstore.KeyedJaggedTensor.from_lengths_sync(
            ["t"], drawn, torch.ones(BATCH, dtype=torch.int64)
        )


def figures(module: tierstore.EmbeddingBagCollection) -> np.ndarray:
    """Rows that the fast tier lacked, and the store's requests and bytes."""
    store = module.engine.store.stats()
    return np.array([module.engine.stats()["tiers"]["ssd"]["rows"], store.read_requests, store.read_bytes])


def measured(folder: Path, exponent: float, window: int, trains: bool) -> np.ndarray:
    """Rows that a batch lacks, and requests and bytes per step, in the steady state."""
    ahead = int(ROOM * read_ahead.bytes_per_row(SIZE)) + 1
    config = tierstore.TierConfig(
        hbm=5000 * (SIZE + 57), path=folder, ssd="1GiB", depth=1, window=window, read_ahead=ahead
    )
    tables = [config_of(ROWS)]
    module = tierstore.EmbeddingBagCollection(tables=tables, config=config, optimizer=SGD(lr=0.1))
    for ids in np.array_split(np.random.default_rng(0).permutation(ROWS), 20):
        module.engine.write_rows(0, ids, np.zeros((len(ids), DIM), np.float32), None)
    module.engine.commit()
    before, after = np.zeros(3), np.zeros(3)
    for step, batch in enumerate(tierstore.prefetch(batches(exponent), module), 1):
        out = module(batch).values()
        if trains:
            out.sum().backward()
        if step == WARM:
            before = figures(module)
        if step == WARM + STEPS - window:
            after = figures(module)
    module.engine.close(commit=False)
    return (after - before) / (STEPS - window)


def predicted(lacking: float, window: int, stored: float) -> np.ndarray:
    """Requests and bytes per step of the model."""
    count = round_batches(window, ROOM, lacking)
    return np.array(merged_reads(GAP, lacking * count, record_bytes(SIZE), stored)) / count


@pytest.mark.parametrize("window", [8, 64])  # the window ends a round; the room does
@pytest.mark.parametrize("exponent", [0.0, 0.8, 0.95])
def test_requests_are_the_runtimes(tmp_path: Path, exponent: float, window: int) -> None:
    """Batches that only look up rows change none, so places stay random."""
    lacking, *want = measured(tmp_path / "rows", exponent, window, trains=False)
    got = predicted(lacking, window, ROWS * record_bytes(SIZE))
    np.testing.assert_allclose(got, want, rtol=0.1)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 0.95])
def test_requests_of_training_are_about_the_runtimes(tmp_path: Path, exponent: float) -> None:
    """Rows that are written about the same time lie together. The more skewed popularity is, the more of them
    are asked for together, which the model does not know."""
    lacking, *want = measured(tmp_path / "rows", exponent, 64, trains=True)
    got = predicted(lacking, 64, rounds.FILE_BYTES * ROWS * record_bytes(SIZE))
    assert 0.85 * want[0] < got[0] < 1.4 * want[0]
    assert 0.9 * want[1] < got[1] < 1.2 * want[1]


def problem(**changes: object) -> Problem:
    planner = EmbeddingShardingPlanner(machine(), workload=Workload(512, **changes))
    return planner.problem([table(rows=1 << 20, dim=64, pooling_factor=64.0)])


def test_windows_are_given_or_end_somewhere() -> None:
    assert problem(window=8).window == 8
    assert problem(window=8, read_ahead=0).held_share == 0
    assert problem(window=8).held_share == 1  # within the window's own bytes
    assert problem(window=1000, read_ahead=1 << 20).held_share == 0.5
    lengths = [problem(read_ahead=size << 20).window for size in (0, 64, 256)]
    assert lengths == sorted(set(lengths))
    few = replace(problem(), tables=[table(pooling_factor=0.1)])
    assert few.window == rounds.MAX_WINDOW


@pytest.mark.parametrize("read_ahead_bytes", [0, 400_000, 1_600_000])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 0.95])
def test_an_automatic_window_ends_where_the_runtimes_does(
    exponent: float, read_ahead_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = 1 << 18
    monkeypatch.setattr(windows, "WINDOW_BYTES", own)
    monkeypatch.setattr(rounds.Ahead, "__init__", partialmethod(rounds.Ahead.__init__, own=own))
    config = tierstore.TierConfig(hbm=5000 * (SIZE + 57), engine="memory", read_ahead=read_ahead_bytes)
    tables = tierstore.EmbeddingBagCollection(tables=[config_of(ROWS)], config=config, optimizer=SGD(lr=0.1))
    ahead = tierstore.prefetch(batches(exponent), tables)
    (group,) = tables.engine.groups
    tier: Any = group.stack.tiers[-1]
    held = 0.0
    for batch in ahead:
        tables(batch)
        if read_ahead_bytes:
            held = tier.ahead.max_rows * read_ahead.bytes_per_row(SIZE) / read_ahead_bytes
        if group.stats.prefetched is not None:
            break
    ahead.close()
    tables.engine.close(commit=False)
    spec = replace(
        table(rows=ROWS, dim=DIM, pooling_factor=1.0), optimizer="sgd", popularity=Popularity(exponent, 10.0)
    )
    planner = EmbeddingShardingPlanner(machine(), workload=Workload(BATCH, read_ahead=read_ahead_bytes))
    predicted = planner.problem([spec])
    assert predicted.window == pytest.approx(group.stats.prefetched[1], rel=0.1, abs=2)
    assert predicted.held_share == pytest.approx(held, rel=0.1)


def test_memory_for_reading_ahead_is_part_of_a_plan() -> None:
    rows, each = 1 << 20, RowWiseAdagrad().row_bytes(64)
    host = rows * 12 + (90 << 20)
    plans = {
        ahead: EmbeddingShardingPlanner(
            machine(host_memory_per_host=host), workload=Workload(512, read_ahead=ahead), search_seconds=0.1
        ).plan([config_of(rows)])
        for ahead in (0, 1 << 20, 4 << 20, None)
    }
    memory = {}
    for ahead, plan in plans.items():
        (shard,), (rank,) = plan.tables[0].shards, plan.report["ranks"]
        most = min(host // costs.READ_AHEAD_OF_MEMORY, rows * each // costs.READ_AHEAD_SHARE)
        assert shard.read_ahead_bytes == rank["read_ahead_bytes"]
        assert shard.read_ahead_bytes == pytest.approx(most if ahead is None else ahead, abs=1)
        assert shard.ssd_bytes > 0
        assert plan.report["hosts"][0]["host_memory_bytes"] <= host
        memory[ahead] = shard.uvm_rows * costs.slot_bytes(each)
    assert memory[0] - memory[4 << 20] == pytest.approx(4 << 20, rel=0.01)


def test_tables_in_memory_take_none_for_reading_ahead() -> None:
    plan = EmbeddingShardingPlanner(topology(1, 1), batch_size=512, search_seconds=0.1).plan(
        [config_of(1 << 20)]
    )
    assert plan.report["ranks"][0]["read_ahead_bytes"] == plan.tables[0].shards[0].read_ahead_bytes == 0


def test_more_memory_for_reading_ahead_saves_reads() -> None:
    machines = machine(host_memory_per_host=(1 << 20) * 12 + (90 << 20))
    sizes = 0, 4 << 20, 16 << 20
    seconds = [drives(1 << 20, 1 << 12, machines, window=256, read_ahead=size) for size in sizes]
    assert seconds[0] > 1.1 * seconds[1] > 1.1 * seconds[2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("host", "rows", "most"),
    [
        ("300MiB", 1 << 20, (300 << 20) / costs.READ_AHEAD_OF_MEMORY),
        ("64GiB", 1 << 20, (1 << 20) * 272 / costs.READ_AHEAD_SHARE),
        ("2TiB", 1 << 30, costs.READ_AHEAD_AT_MOST),
    ],
)
def test_automatic_bytes_are_the_most_that_reading_ahead_may_take(
    host: str, rows: int, most: float, device: str
) -> None:
    machines = machine(host_memory_per_host=host, device=device)
    planner = EmbeddingShardingPlanner(machines, workload=Workload(512))
    assert planner.problem([table(rows=rows, dim=64, pooling_factor=8.0)])._ahead.read_ahead == most
