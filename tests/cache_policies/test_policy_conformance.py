"""What every policy must do, registered ones and a user's own alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache_policies
from cache_policies import PolicyError
from cache_policies.fifo import Fifo
from cache_policies.lists import push_newest, unlink
from tests.cache_policies.policy_driver import Driver
from tests.cache_policies.policy_oracles import ORACLES

KNOWN = cache_policies.names()

delta = st.none() | st.integers(1, 6)
plan = st.fixed_dictionaries(
    {
        "announce": st.lists(st.tuples(st.integers(0, 40), delta), max_size=6),
        "touch": st.lists(st.tuples(st.integers(0, 40), delta), max_size=8),
        "keys": st.lists(st.integers(0, 30), max_size=8),
        "insert": st.lists(delta, max_size=8),
        "remove": st.lists(st.integers(0, 40), max_size=2),
        "depth": st.integers(0, 3),
        "extra": st.integers(0, 3),
    }
)


def run_plan(driver: Driver, step: dict) -> None:
    """One plan as the engine runs it; indices pick among the resident slots."""

    def pick(pairs):
        resident = sorted(driver.row_in)
        return {resident[i % len(resident)]: d for i, d in pairs} if resident else {}

    announced = pick(step["announce"])
    driver.announce(list(announced), list(announced.values()))
    touched = pick(step["touch"])
    driver.touch(list(touched), list(touched.values()))
    resident = set(driver.row_in.values())
    missed = [key for key in dict.fromkeys(step["keys"]) if key not in resident]
    driver.admit(missed)
    lacking = len(missed) - len(driver.free) + step["extra"]
    if lacking > 0:
        driver.evict(lacking, driver.now - step["depth"])
    driver.insert(len(missed), step["insert"], missed)
    removed = pick([(i, None) for i in step["remove"]])
    driver.remove(list(removed))
    driver.now += 1


@pytest.mark.parametrize("name", KNOWN)
@given(capacity=st.integers(1, 12), plans=st.lists(plan, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_history_keeps_the_contract_and_matches_the_oracle(name, capacity, plans):
    driver = Driver(name, capacity, ORACLES.get(name))
    for step in plans:
        run_plan(driver, step)
    driver.evict(capacity, driver.now)
    assert not driver.row_in


@pytest.mark.parametrize("name", KNOWN)
def test_large_random_history(name):
    rng = np.random.default_rng(7)
    driver = Driver(name, 300, ORACLES.get(name))
    for _ in range(150):
        numbers = rng.integers(0, 10**6, 200).tolist()
        uses = [int(d) if d < 40 else None for d in rng.integers(1, 60, 200)]
        run_plan(
            driver,
            {
                "announce": list(zip(numbers[:30], uses, strict=False)),
                "touch": list(zip(numbers[30:110], uses[30:], strict=False)),
                "keys": rng.zipf(1.2, int(rng.integers(0, 80))).tolist(),
                "insert": uses[110:190],
                "remove": numbers[:2],
                "depth": int(rng.integers(0, 4)),
                "extra": 0,
            },
        )


@pytest.mark.parametrize("name", KNOWN)
class TestEdges:
    def test_empty_cache_has_no_victims(self, name):
        assert Driver(name, 4).evict(4, 10) == []

    def test_capacity_one(self, name):
        driver = Driver(name, 1)
        for _ in range(5):
            driver.insert(1)
            driver.touch([0])
            assert driver.evict(3, driver.now) == []
            driver.now += 1
            assert driver.evict(3, driver.now) == [0]

    def test_all_pinned(self, name):
        driver = Driver(name, 8)
        driver.insert(8)
        assert driver.evict(8, 0) == []
        driver.now = 3
        driver.touch([2, 5])
        assert set(driver.evict(8, 3)) == {0, 1, 3, 4, 6, 7}

    def test_repeated_touches(self, name):
        driver = Driver(name, 3)
        driver.insert(3)
        for now in range(1, 200):
            driver.now = now
            driver.touch([now % 2], [1])
        assert len(driver.evict(5, 1000)) == 3

    def test_remove_and_insert_again(self, name):
        driver = Driver(name, 5)
        for _ in range(4):
            driver.insert(5)
            driver.remove([0, 3, 4])
            driver.insert(2)
            driver.now += 1
            driver.remove(sorted(driver.row_in))
        assert driver.evict(5, driver.now) == []

    def test_sequence_numbers_beyond_32_bits(self, name):
        driver = Driver(name, 4)
        driver.now = 2**40
        driver.insert(4, [1, 2, 3, None])
        driver.now += 5000
        driver.announce([0], [4000])
        driver.touch([1], [3])
        assert set(driver.evict(4, driver.now)) == {0, 2, 3}

    def test_states_are_apart(self, name):
        one, other = Driver(name, 4), Driver(name, 4)
        one.insert(4)
        assert other.evict(4, 10) == []

    def test_stated_memory_is_true(self, name):
        policy = cache_policies.get(name)
        for capacity in (1, 100, 5000, 1 << 18, 1 << 21):
            stated = policy.fixed_bytes + policy.bytes_per_slot * capacity
            assert policy.compile(capacity).nbytes <= stated + 1e-6
        assert policy.compile(1 << 21).nbytes >= 0.99 * (policy.bytes_per_slot * (1 << 21))

    @pytest.mark.parametrize("capacity", [0, -1, 2**31])
    def test_capacity_out_of_range(self, name, capacity):
        with pytest.raises(PolicyError, match="capacity"):
            cache_policies.get(name).compile(capacity)


@pytest.mark.parametrize("name", KNOWN)
def test_the_check_for_ones_own_policies_finds_nothing(name):
    cache_policies.check(name, plans=60)


class ForgetsRows(Fifo):
    """Returns the rows of one slot never."""

    name = "forgets_rows"

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            if slot != 1:
                push_newest(s.prev, s.next, s.next.size - 1, slot)
            else:
                s.prev[1] = s.next[1] = 1


class IgnoresPins(Fifo):
    name = "ignores_pins"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        sentinel = s.next.size - 1
        count = 0
        while count < n and s.next[sentinel] != sentinel:
            victims[count] = s.next[sentinel]
            unlink(s.prev, s.next, victims[count])
            count += 1
        return count


@pytest.mark.parametrize(
    ("policy", "message"), [(ForgetsRows, "evict returned"), (IgnoresPins, "a pinned slot")]
)
def test_the_check_finds_broken_promises(policy, message):
    with pytest.raises(PolicyError, match=message):
        cache_policies.check(policy)


def test_unknown_policy_lists_the_known():
    with pytest.raises(PolicyError, match="lookahead, lru"):
        cache_policies.get("mru")
