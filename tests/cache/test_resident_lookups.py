"""Lookups of rows that never leave their tier are made without a plan, and change nothing that a plan would
not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from cache_policies.live import load
from tests.bags import Bags, budget, build, random_batches, train
from tierstore import TierConfig, TieredEmbeddingBag, _core, optim
from tierstore.cache.layout import IdSegment

ADAGRAD = optim.Adagrad(lr=0.1)
IN_MEMORY = TierConfig(hbm="all")
CONFIGS = {
    "one tier": IN_MEMORY,
    "over a store": TierConfig(hbm=budget(4000, ADAGRAD), engine="memory"),
    "a budget for all rows": TierConfig(hbm=budget(4000, ADAGRAD), ssd=0),
}
DIMS = (5, 5)


def epochs(count: int) -> list[list[torch.Tensor]]:
    return random_batches(5, 6, 2, 40, 3) * count


def planned(module: Bags) -> Bags:
    """The same module, which makes a plan for every lookup."""
    for group in module.engine.groups:
        group.resident = None
    return module


def without_seconds(stats: Any) -> Any:
    if not isinstance(stats, dict):
        return stats
    kept = {key: value for key, value in stats.items() if not str(key).endswith("_seconds")}
    return {key: without_seconds(value) for key, value in kept.items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_counters_and_curves_are_those_of_plans(config: TierConfig) -> None:
    with build(config, ADAGRAD, DIMS) as module, planned(build(config, ADAGRAD, DIMS)) as oracle:
        for ours, expected in zip(train(module, epochs(8)), train(oracle, epochs(8)), strict=True):
            assert torch.equal(ours, expected)
        stats = without_seconds(module.engine.stats())
        expected_stats = without_seconds(oracle.engine.stats())
        assert stats.pop("memory").keys() == expected_stats.pop("memory").keys()
        assert stats == expected_stats
        assert stats["lookups"] == 48 * len(module.engine.groups)
        assert module.engine.table_curves() == oracle.engine.table_curves()
        if config is CONFIGS["over a store"]:
            assert module.engine.groups[0].uncommitted_rows() == oracle.engine.groups[0].uncommitted_rows()


def plans(module: Bags, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    for group in module.engine.groups:
        plan = group.plan
        monkeypatch.setattr(group, "plan", lambda *a, plan=plan, **k: (made.append(1), plan(*a, **k)))
    return made


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_only_rows_that_a_lower_tier_may_have_need_a_plan(
    config: TierConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_be_lower = config is CONFIGS["over a store"]
    with build(config, ADAGRAD, DIMS) as module:
        made = plans(module, monkeypatch)
        train(module, epochs(1))
        assert len(made) == 6 * may_be_lower
        train(module, epochs(3))
        assert len(made) == 6 * may_be_lower
        ids = [torch.full((2, 1), 1999), torch.zeros((2, 1), dtype=torch.int64)]
        train(module, [ids, ids])
        assert len(made) == 7 * may_be_lower


def test_a_tier_that_evicts_makes_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    with build(TierConfig(hbm=budget(300, ADAGRAD), engine="memory"), ADAGRAD, DIMS) as module:
        made = plans(module, monkeypatch)
        train(module, epochs(2))
        assert len(made) == 12


def test_counters_begin_again_at_a_reset() -> None:
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        train(module, epochs(4))
        module.engine.reset_stats()
        train(module, epochs(1)[:5])
        stats = module.engine.stats()
        assert stats["lookups"] == 5
        assert stats["tiers"]["hbm"]["hit_rate"] == {"per_access": 1.0, "per_unique": 1.0}
        assert stats["tiers"]["hbm"]["accesses"] == 5 * 2 * 40 * 3


def test_counting_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is busy does not get the same work again at every lookup."""
    asked: list[Callable[[], None]] = []
    load()
    monkeypatch.setattr("tierstore.cache.resident_lookups.soon", asked.append)
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        train(module, epochs(3)[:15])
        assert not asked
        train(module, epochs(3))
        assert len(asked) == 1
        asked[0]()
        train(module, epochs(3)[:15])
        assert len(asked) == 1
        train(module, epochs(1)[:1])
        assert len(asked) == 2
        assert module.engine.stats()["lookups"] == 15 + 18 + 16


def test_training_goes_on_while_what_counts_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes a second, once in a process, and compiling it many."""
    may_load, loads = threading.Event(), threading.Event()

    def loading() -> None:
        loads.set()
        assert may_load.wait(60)

    monkeypatch.setattr("tierstore.cache.resident_lookups.is_loaded", may_load.is_set)
    monkeypatch.setattr("tierstore.cache.resident_lookups.load", loading)
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        train(module, epochs(3)[:16])
        assert loads.wait(60)
        train(module, random_batches(6, 4, 2, 40, 3))  # also lookups that add rows
        module.engine.flush()  # work that the main thread waits for
        may_load.set()
        assert module.engine.stats()["lookups"] == 20


def test_rows_are_not_found_before_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread brings rows in, and another looks the same rows up meanwhile."""
    ids = [torch.arange(60).view(20, 3), torch.arange(60).view(20, 3)]
    with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
        expected = oracle(ids).detach()
    with build(CONFIGS["over a store"], ADAGRAD, DIMS) as module:
        group = module.engine.groups[0]
        fill, filling = group._moves.fill, threading.Event()

        def slowly(*arguments: Any) -> None:
            filling.set()
            time.sleep(0.3)
            fill(*arguments)

        monkeypatch.setattr(group._moves, "fill", slowly)
        other = threading.Thread(target=lambda: module(ids))
        other.start()
        assert filling.wait(20)
        assert torch.equal(module(ids).detach(), expected)
        other.join(20)


def test_a_fill_that_fails_leaves_the_tier_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = epochs(1)
    with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
        expected = train(oracle, batches * 2)
    with build(CONFIGS["over a store"], ADAGRAD, DIMS) as module:
        group = module.engine.groups[0]
        with monkeypatch.context() as patch:

            def fails(*_: Any) -> None:
                raise MemoryError

            patch.setattr(group._moves, "fill", fails)
            with pytest.raises(MemoryError):
                module(batches[0])
        for ours, theirs in zip(train(module, batches * 2), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert module.engine.stats()["lookups"] == 12


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


IDS = [torch.arange(60).view(20, 3), torch.arange(60).view(20, 3)]


def test_no_row_is_added_while_a_plan_counts_on_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that has found rows missing waits; a lookup of the same rows must not add them meanwhile."""
    with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
        expected = oracle(IDS).detach()
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        group = module.engine.groups[0]
        find_victims, begun = group._find_victims, threading.Event()

        def slowly(*arguments: Any) -> None:
            begun.set()
            time.sleep(0.3)
            find_victims(*arguments)

        monkeypatch.setattr(group, "_find_victims", slowly)
        resident, results = group.resident, []
        group.resident._initial, initial = None, group.resident._initial  # so the first lookup makes a plan
        other = in_thread(lambda: results.append(module(IDS).detach()))
        assert begun.wait(20)
        resident._initial = initial
        assert torch.equal(module(IDS).detach(), expected)
        other.join(20)
        assert torch.equal(results[0], expected)
        assert len(group.fast) == 120


def test_a_lookup_that_adds_rows_waits_for_the_thread_that_moves_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
        expected = oracle(IDS).detach()
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        made, results = plans(module, monkeypatch), []
        with module.engine.groups[0].residency_lock:
            other = in_thread(lambda: results.append(module(IDS).detach()))
            other.join(0.3)
            assert not results
        other.join(20)
        assert torch.equal(results[0], expected)
        assert len(made) == 1


def test_a_value_that_cannot_be_written_leaves_the_tier_as_it_was() -> None:
    """The core checks the tables of rows; a batch of a table without initial values adds no row."""
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        group = module.engine.groups[0]
        ids = np.arange(50, dtype=np.int64)
        foreign = IdSegment("foreign", ids.ctypes.data, 50, False, 7, 2000)
        with pytest.raises(ValueError, match="no entry in kinds"):
            group.lookup(group.batch([foreign]))
        assert len(group.fast.native) == 0
        assert torch.equal(module(IDS), module(IDS))


REFUSED = """
import resource
import torch
from tierstore import TieredEmbedding, TierConfig
from tierstore.errors import TierFullError

table = TieredEmbedding(4_000_000, 64, config=TierConfig(hbm="all"))
few, many = torch.arange(1000), torch.arange(1_000_000)
expected = table(few).detach()
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
_, hard = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (used + (128 << 20), hard))
try:
    table(many)
except TierFullError as error:
    print(error)
assert torch.equal(table(few), expected)
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
assert torch.equal(table(many)[:1000], expected)
print(len(table.engine.groups[0].fast))
"""


def test_refused_memory_is_a_named_error_and_changes_nothing() -> None:
    run = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    error, rows = run.stdout.splitlines()
    assert "raise hbm" in error
    assert rows == "1000000"


def test_threads_that_look_up_and_add_rows_at_once() -> None:
    """Rows that nobody updates are the same at every lookup, whichever rows are added meanwhile."""
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        batches, errors = random_batches(7, 60, 2, 50, 3), []
        with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
            expected = [oracle(ids).detach() for ids in batches]

        def look_up(begin: int) -> None:
            for number in [*range(begin, 60), *range(begin)] * 3:
                if not torch.equal(module(batches[number]).detach(), expected[number]):
                    errors.append(number)

        threads = [threading.Thread(target=look_up, args=(begin,)) for begin in (0, 15, 30, 45)]
        for thread in threads:
            thread.start()
        look_up(5)
        for thread in threads:
            thread.join(60)
        assert not errors
        assert module.engine.stats()["lookups"] == 5 * 180


def read(module: Bags, batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module(batch).clone() for batch in batches]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_reads_are_those_of_copies_and_change_nothing(config: TierConfig) -> None:
    """Before any training, between steps of it, and of rows of which some are there."""
    with build(config, ADAGRAD, DIMS) as module, planned(build(config, ADAGRAD, DIMS)) as oracle:
        data = random_batches(5, 12, 2, 40, 3)
        for step in range(0, 12, 3):
            for ours, expected in zip(read(module, data), read(oracle, data), strict=True):
                assert torch.equal(ours, expected)
            assert len(module.engine.groups[0].fast) == len(oracle.engine.groups[0].fast)
            train(module, data[step : step + 3])
            train(oracle, data[step : step + 3])
        stats, expected_stats = (without_seconds(one.engine.stats()) for one in (module, oracle))
        assert stats["read_rows"] == expected_stats["read_rows"] > 0
        assert stats["lookups"] == expected_stats["lookups"] == 12
        assert module.engine.table_curves() == oracle.engine.table_curves()


@pytest.mark.parametrize("trained", [False, True])
def test_a_read_waits_for_no_other_thread(trained: bool) -> None:
    """The main thread reads while another thread holds the lock of the group, and the worker waits for it."""
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        if trained:
            train(module, [IDS])
        expected, held, done = read(module, [IDS])[0], threading.Event(), threading.Event()

        def hold() -> None:
            with module.engine.groups[0].residency_lock:
                held.set()
                done.wait(20)

        other = in_thread(hold)
        assert held.wait(20)
        begin = time.monotonic()
        assert torch.equal(read(module, [IDS])[0], expected)
        assert time.monotonic() - begin < 10
        done.set()
        other.join(20)


def test_rows_that_were_read_are_no_part_of_a_later_update() -> None:
    """A read keeps no copy: the next one has what training has made of the rows."""
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        train(module, [IDS])
        before = read(module, [IDS])[0]
        train(module, [IDS])
        after = read(module, [IDS])[0]
        assert not torch.equal(before, after)
        assert torch.equal(after, module(IDS).detach())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [511, 512, 513, 4095, 4096, 4097, 8193, 40_000])
def test_threads_find_rows_in_pieces(count: int, threads: int) -> None:
    """Around the sizes of the pieces; one row is missing at last, the first or the last one."""
    before = _core.num_threads()
    with TieredEmbeddingBag(50_000, 4, mode="sum", config=IN_MEMORY, optimizer=ADAGRAD) as module:
        ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(count))[: count + 1]
        module(ids[:count].view(-1, 1))
        group = module.engine.groups[0]
        native = group.resident._native
        tierstore.set_num_threads(threads)
        try:
            for order, are_here in ((ids[:count], True), (ids, False), (ids.flip(0), False)):
                numbers = order.numpy().copy()
                segment = IdSegment("t", numbers.ctypes.data, len(numbers), False, 0, 50_000)
                batch = group.batch([segment])
                found = native.find(batch)
                assert (found is not None) == are_here
                if found is not None:
                    assert np.array_equal(found.slots, group.fast.native.find(batch.unique))
        finally:
            tierstore.set_num_threads(before)
