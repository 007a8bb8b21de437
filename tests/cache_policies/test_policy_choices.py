"""What sets single policies and filters apart: memory of evicted rows, drift, given frequencies,
admission.
"""

from __future__ import annotations

import numpy as np
import pytest

import cache_policies
from cache_policies import PolicyError, get_admission, prepare_flat, simulate
from cache_policies.lfu_aged import LfuAged
from cache_policies.static_top import StaticTop
from cache_policies.w_tinylfu import WTinyLfu
from tests.cache_policies.libcachesim_traces import drifting, looping, skewed
from tests.cache_policies.policy_driver import Driver


def misses(trace, policy, capacity=300, **options) -> int:
    return simulate(trace, policy, capacity, **options).misses


@pytest.fixture(scope="module")
def traces():
    return {name: prepare_flat(keys(), 1) for name, keys in (("skewed", skewed), ("drifting", drifting))}


def test_frequency_helps_where_popularity_stays_and_ageing_where_it_moves(traces):
    still, moving = traces["skewed"], traces["drifting"]
    assert misses(still, "lfu") < misses(still, "lfu_aged") < misses(still, "lru")
    assert misses(moving, "lfu_aged") < misses(moving, "lfu")
    assert misses(moving, LfuAged(0.01)) == pytest.approx(misses(moving, "lru"), rel=0.02)


def test_no_policy_beats_belady(traces):
    for trace in traces.values():
        least = misses(trace, "belady")
        assert all(misses(trace, name) > least for name in cache_policies.names() if name != "belady")


def test_w_tinylfu_resists_loops():
    trace = prepare_flat(looping(), 1)
    assert misses(trace, "w_tinylfu", 500) < 0.9 * misses(trace, "lru", 500)
    assert misses(trace, WTinyLfu(window=0.5), 500) > misses(trace, "w_tinylfu", 500)


def test_given_frequencies_keep_the_most_frequent_rows():
    trace = prepare_flat(skewed(), 1)
    counts = np.bincount(trace.rows)
    informed = StaticTop(trace.keys, counts)
    assert misses(trace, informed) < misses(trace, "lfu")
    assert misses(trace, StaticTop()) == misses(trace, "lru")


@pytest.mark.parametrize(("keys", "counts"), [([1, 2], [1]), ([1], [-1])])
def test_given_frequencies_must_fit(keys, counts):
    with pytest.raises(PolicyError, match="as many counts"):
        StaticTop(np.array(keys), np.array(counts))


def test_counter_admits_at_the_nth_miss():
    gate = get_admission("counter(3)").compile(1000)
    keys = np.array([7, 8], np.uint64)
    outcomes = []
    for now in range(4):
        admitted = np.ones(2, np.uint8)
        gate.admit(keys[: 1 if now == 2 else 2], now, admitted)
        outcomes.append(admitted.tolist())
    assert outcomes == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_bloom_admits_what_was_missed_lately():
    gate = get_admission("bloom(100)").compile(10)

    def admitted(*keys):
        out = np.ones(len(keys), np.uint8)
        gate.admit(np.array(keys, np.uint64), 0, out)
        return out.tolist()

    assert admitted(1, 2, 1) == [0, 0, 1]
    admitted(*range(1000, 1090))
    assert admitted(2) == [1]
    admitted(*range(2000, 2300))
    assert admitted(1) == [0]


@pytest.mark.parametrize("name", ["counter(2)", "bloom"])
@pytest.mark.parametrize("policy", ["fifo", "arc", "s3_fifo"])
def test_admission_spares_the_cache_rows_used_once(policy, name):
    u = skewed()
    keys = np.where(np.arange(u.size) % 2 == 0, u, 10_000 + np.arange(u.size))  # every other row comes once
    filtered = simulate(prepare_flat(keys, 64), policy, 300, depth=1, admission=name)
    plain = simulate(prepare_flat(keys, 64), policy, 300, depth=1)
    assert filtered.refused > 20_000
    assert plain.refused == 0
    assert filtered.overflowed == 0
    if policy == "fifo":
        assert filtered.misses < plain.misses


@pytest.mark.parametrize("name", ["counter", "bloom", "always"])
def test_filters_state_their_memory(name):
    gate = get_admission(name)
    for capacity in (1, 100, 1 << 21):
        assert gate.compile(capacity).nbytes <= gate.fixed_bytes + gate.bytes_per_slot * capacity


@pytest.mark.parametrize("name", ["never", "counter(x)", "counter(-1)"])
def test_unknown_filters(name):
    with pytest.raises(PolicyError, match="known: always"):
        get_admission(name)


@pytest.mark.parametrize("make", [lambda: get_admission("counter(1)"), lambda: LfuAged(0)])
def test_parameters_out_of_range(make):
    with pytest.raises(PolicyError, match="must be"):
        make()


def test_a_policy_may_be_registered_once_by_its_own_name():
    with pytest.raises(PolicyError, match="built-in"):
        cache_policies.register(LfuAged)


@pytest.mark.parametrize("policy", ["arc", "s3_fifo"])
def test_returning_rows_are_known_even_where_admit_is_not_called(policy):
    """An engine without the optional hook: ghosts are noticed late, but they are noticed."""

    def resident_after(tell: bool) -> set[int]:
        driver = Driver(policy, 10)
        for key in [*range(40), *range(33, 36), *range(50, 60)]:
            driver.now += 1
            if tell:
                driver.admit([key])
            if not driver.free:
                driver.evict(1, driver.now)
            slots = driver.insert(1, keys=[key])
            if key < 5:
                driver.now += 1
                driver.touch(slots)
        return set(driver.row_in.values())

    assert {33, 34, 35} & resident_after(tell=False)
    assert {33, 34, 35} & resident_after(tell=True)
