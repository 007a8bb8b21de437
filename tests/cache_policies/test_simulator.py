"""The simulator against a plain model of the live engine's plans, and its own invariants."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache_policies
from cache_policies import UNKNOWN, Policy, PolicyError, automatic_windows, prepare, prepare_flat, simulate
from cache_policies.lru import Lru
from tests.cache_policies.policy_oracles import ORACLES

batches_of_keys = st.lists(st.lists(st.integers(0, 14), max_size=9), max_size=25)


def arrays(batches) -> list[np.ndarray]:
    return [np.array(batch, np.int64) for batch in batches]


def model(batches, oracle, capacity, depth, window, on_demand=0) -> dict[str, int]:
    """Plans as docs/design.md tells them, with dictionaries; windows are looked through anew each time."""
    raw = batches
    batches = [list(dict.fromkeys(batch)) for batch in batches]
    slot_of: dict[int, int] = {}
    free = list(range(capacity))
    last_use = [-1] * capacity
    seen: set[int] = set()
    counts = {"misses": 0, "access_misses": 0, "compulsory": 0, "overflowed": 0, "shrunk_plans": 0}

    def next_use(key, after):
        end = after + window + 1 if after >= on_demand else after
        return next((j for j in range(after + 1, min(end, len(batches))) if key in batches[j]), UNKNOWN)

    for i, batch in enumerate(batches):
        learnt = [i + window] if i > on_demand else range(i, i + window + 1) if i == on_demand else []
        for new in [j for j in learnt if j < len(batches)]:
            between = {key for batch in batches[i:new] for key in batch}
            fresh = [key for key in batches[new] if key in slot_of and key not in between]
            if window:
                oracle.announce([slot_of[key] for key in fresh], [new] * len(fresh), i)
        hits = [key for key in batch if key in slot_of]
        missed = [key for key in batch if key not in slot_of]
        for key in hits:
            last_use[slot_of[key]] = i
        oracle.touch([slot_of[key] for key in hits], hits, [next_use(key, i) for key in hits], i)
        slots, free = free[: len(missed)], free[len(missed) :]
        shrunk = False
        first_pinned = min(i, max(i - depth, on_demand))
        for pinned_since in range(first_pinned, i + 1):
            if len(slots) == len(missed):
                break
            shrunk = pinned_since > first_pinned
            victims = oracle.evict(len(missed) - len(slots), last_use, pinned_since)
            slot_of = {key: slot for key, slot in slot_of.items() if slot not in victims}
            slots += victims
        placed = missed[: len(slots)]
        for key, slot in zip(placed, slots, strict=True):
            slot_of[key] = slot
            last_use[slot] = i
        oracle.insert(slots, placed, [next_use(key, i) for key in placed], i)
        counts["misses"] += len(missed)
        counts["access_misses"] += sum(raw[i].count(key) for key in missed)
        counts["compulsory"] += len(set(missed) - seen)
        counts["overflowed"] += len(missed) - len(placed)
        counts["shrunk_plans"] += shrunk
        seen.update(missed)
    return counts


def counts_of(simulation) -> dict[str, int]:
    names = ("misses", "access_misses", "compulsory", "overflowed", "shrunk_plans")
    return {name: getattr(simulation, name) for name in names}


settings_of_plans = {
    "capacity": st.integers(1, 14),
    "depth": st.integers(0, 3),
    "window": st.integers(0, 5),
    "on_demand": st.integers(0, 2),
}


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "belady"])
@given(batches=batches_of_keys, setting=st.fixed_dictionaries(settings_of_plans))
@settings(max_examples=60, deadline=None)
def test_counts_equal_the_model(name, batches, setting):
    capacity = setting.pop("capacity")
    expected = model(batches, ORACLES[name](capacity), capacity, **setting)
    assert counts_of(simulate(arrays(batches), name, capacity, **setting)) == expected


@given(batches=batches_of_keys, capacity=st.integers(1, 14), depth=st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_belady_is_lookahead_that_sees_everything(batches, capacity, depth):
    whole = simulate(arrays(batches), "lookahead", capacity, depth=depth, window=len(batches))
    assert counts_of(simulate(arrays(batches), "belady", capacity, depth=depth)) == counts_of(whole)


def fewest_misses(requests, capacity) -> int:
    """Optimum over every choice of victims, one request at a time."""
    costs = {frozenset(): 0}
    for key in requests:
        after: dict[frozenset, int] = {}
        for resident, cost in costs.items():
            if key in resident:
                choices = [resident]
            elif len(resident) < capacity:
                choices = [resident | {key}]
            else:
                choices = [resident - {victim} | {key} for victim in resident]
            for choice in choices:
                total = cost + (key not in resident)
                after[choice] = min(total, after.get(choice, total))
        costs = after
    return min(costs.values())


@given(requests=st.lists(st.integers(0, 5), max_size=14), capacity=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_belady_is_the_optimum(requests, capacity):
    trace = prepare_flat(np.array(requests, np.int64), 1)
    assert simulate(trace, "belady", capacity).misses == fewest_misses(requests, capacity)


@pytest.mark.parametrize("name", cache_policies.names())
def test_slot_for_every_row_leaves_compulsory_misses_only(name):
    rng = np.random.default_rng(1)
    batches = [rng.zipf(1.3, 200) % 5000 for _ in range(30)]
    trace = prepare(batches)
    result = simulate(trace, name, trace.footprint, depth=2, window=4)
    assert result.misses == result.compulsory == trace.footprint
    assert result.capacity_miss_ratio == 0
    assert result.accesses == 6000


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_flat_traces_equal_batches(batch_size):
    keys = np.random.default_rng(2).integers(0, 300, 5000).astype(np.int32)
    cut = [keys[i : i + batch_size] for i in range(0, keys.size, batch_size)]
    assert simulate(prepare_flat(keys, batch_size), "lru", 50) == simulate(cut, "lru", 50)


def test_keys_of_64_bits_and_empty_batches():
    batches = [np.array([2**64 - 1, 2**63, 0], np.uint64), np.empty(0, np.int64), np.array([0, 0], np.uint8)]
    result = simulate(batches, "lru", 3)
    assert (result.batches, result.accesses, result.uniques, result.misses) == (3, 5, 4, 3)


def test_many_distinct_rows_grow_the_table():
    keys = np.random.default_rng(3).permutation(3_000_000)
    trace = prepare_flat(np.concatenate([keys, keys]), 65536)
    assert trace.footprint == 3_000_000
    np.testing.assert_array_equal(trace.keys, keys.astype(np.uint64))
    assert simulate(trace, "lru", 10).misses == trace.uniques


def test_empty_trace():
    assert simulate([], "lru", 3).miss_ratio == 0
    assert simulate(prepare_flat(np.empty(0, np.int64), 1), "belady", 3).misses == 0


@pytest.mark.parametrize("batch", [np.array([-1]), np.array([0.5]), np.zeros((2, 2), np.int64)])
def test_bad_batches(batch):
    with pytest.raises(PolicyError):
        simulate([batch], "lru", 3)


@pytest.mark.parametrize("setting", [{"depth": -1}, {"window": -1}])
def test_bad_settings(setting):
    with pytest.raises(PolicyError, match="negative"):
        simulate([np.array([1])], "lru", 3, **setting)


class ReturnsPinned(Lru):
    name = "returns_pinned"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        count = 0
        for slot in range(n):
            victims[count] = slot
            count += 1
        return count


class ReturnsTwice(ReturnsPinned):
    name = "returns_twice"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        victims[:] = 1
        return n


class ReturnsNowhere(ReturnsPinned):
    name = "returns_nowhere"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        victims[0] = -1
        return 1


class ReturnsTooMany(ReturnsPinned):
    name = "returns_too_many"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return n + 1


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ReturnsPinned, "pinned slot"),
        (ReturnsTwice, "one slot twice"),
        (ReturnsNowhere, "does not exist"),
        (ReturnsTooMany, "more slots"),
    ],
)
def test_misbehaving_policies_are_named(policy, message):
    batches = [np.arange(4), np.array([0, 8, 9])]
    with pytest.raises(PolicyError, match=rf"{policy.name}.*plan \d.*{message}"):
        simulate(batches, policy, 4)


def test_hooks_that_do_not_compile_are_named():
    class Sorted(Lru):
        name = "sorted"

        @staticmethod
        def remove(s, slots):
            print(s, sep=None.x)

    with pytest.raises(PolicyError, match=r"'sorted'.*'remove'"):
        Sorted().compile(3)


def test_state_must_be_flat_arrays():
    class Square(Policy):
        name = "square"

        def state(self, capacity):
            return {"a": np.zeros((capacity, 2))}

    with pytest.raises(PolicyError, match="'a'"):
        Square().compile(3)


CACHE_PROBE = """
import sys, cache_policies.native as native
from cache_policies.lru import Lru
from numba import njit

@njit
def limit():
    return {limit}

class Mine(Lru):
    name = "mine_for_the_cache_test"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return limit()

compiled = Mine().compile(4)
import numpy as np
hits = [f.cache_hits for hooks in native._compiled.values() for f in hooks.values()]
print(compiled.evict(4, np.zeros(4, np.int64), 1).size, sum(hits))
"""


def test_compiled_hooks_are_cached_and_follow_the_code_they_call(tmp_path):
    def run(limit: int) -> str:
        source = CACHE_PROBE.replace("{limit}", str(limit))
        environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(p for p in sys.path if p)}
        return subprocess.run(
            [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    assert run(0) == ["0", "0"]
    assert run(0) == ["0", "5"]  # all hooks came from the disk
    assert run(2)[0] == "2"  # a helper function changed
    for file in tmp_path.rglob("*.nbc"):
        file.write_bytes(b"damaged")
    assert run(2) == ["2", "0"]  # compiled anew


@pytest.mark.parametrize("depth", [0, 2])
def test_a_window_may_be_given_by_batch(depth):
    random = np.random.default_rng(8)
    batches = [random.integers(0, 90, 12) for _ in range(60)]
    for window in (0, 5, 60):
        same = np.full(60, window)
        one, by_batch = (simulate(batches, "lookahead", 30, depth=depth, window=w) for w in (window, same))
        assert one == by_batch
    single = prepare_flat(np.concatenate(batches), 1)
    assert simulate(single, "lookahead", 30, window=np.full(720, 9)) == simulate(
        single, "lookahead", 30, window=9
    )
    growing = np.minimum(np.arange(60) // 2, 12)
    misses = [simulate(batches, "lookahead", 30, depth=depth, window=w).misses for w in (0, growing, 12)]
    assert misses[2] <= misses[1] < misses[0]


@pytest.mark.parametrize("window", [np.full(5, 2), np.array([3, 0, 3]), np.full(3, -1), np.zeros((3, 1))])
def test_windows_that_forget_or_miss_a_batch_are_refused(window):
    with pytest.raises(PolicyError, match="window"):
        simulate([np.array([1])] * 3, "lookahead", 2, window=window)


def test_automatic_windows_end_with_the_batch_that_fills_them():
    trace = prepare([np.array([k % 7, k % 3]) for k in range(50)])
    known = automatic_windows(trace, lambda first, end, distinct: end - first > 4, depth=1)
    assert known.tolist() == [4] * 46 + [3, 2, 1, 0]
    known = automatic_windows(trace, lambda first, end, distinct: distinct >= 7, on_demand=3)
    assert known[:3].tolist() == [0, 0, 0]
    distinct = [
        [len(np.unique(trace.rows[trace.offsets[plan] : trace.offsets[plan + n]])) for n in (more, more + 1)]
        for plan, more in enumerate(known[:40].tolist())
    ][3:]
    assert max(without for without, _ in distinct) < 7  # no window is longer than it needs to be
    assert sum(whole >= 7 for _, whole in distinct) > 30  # a few end with what was pulled
