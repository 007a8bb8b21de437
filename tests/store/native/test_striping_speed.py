"""Devices of one store work at the same time: their reads and writes add up."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.store.native.striped_store import CONFIG, PER_BLOCK, check, open_on, put, striped
from tierstore import _core


def slow_devices(count: int, at_once: int) -> list[_core.FaultEnv]:
    return [_core.FaultEnv(_core.MemoryEnv(), at_once) for _ in range(count)]


def seconds_of(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_reads(devices: int) -> tuple[float, list[_core.FaultEnv]]:
    """Rows five blocks apart, each a request of its own, on devices that serve four at once in 3 ms each."""
    envs, requests = slow_devices(devices, 4), 200
    with open_on(striped(envs), replace(CONFIG, segment_bytes=64 << 20)) as store:
        put(store, range(requests * 5 * PER_BLOCK))
        store.commit(b"")
        for env in envs:
            env.slow_down(0.003)
        ids = np.arange(requests) * 5 * PER_BLOCK
        spent = seconds_of(lambda: check(store, ids))
        reads = [env.counts()["read"] for env in envs]
        for env in envs:
            env.heal()
    assert max(reads) - min(reads) <= 1
    return spent, envs


def test_reads_of_two_devices_add_up():
    ratios = []
    for _ in range(5):
        (one, _), (two, envs) = timed_reads(1), timed_reads(2)
        assert [env.most_at_once() for env in envs] == [4, 4]  # the queue depth, on each
        ratios.append(one / two)
        if ratios[-1] >= 1.8:
            return
    pytest.fail(f"two devices are only {max(ratios):.2f} times as fast as one")


def timed_writes(devices: int) -> float:
    """Chunks that each take a device, which serves one at a time, 5 ms, and the commit."""
    envs = slow_devices(devices, 1)
    with open_on(striped(envs), replace(CONFIG, segment_bytes=64 << 20)) as store:
        put(store, range(10))
        store.commit(b"")
        before = [env.counts()["write"] for env in envs]
        for env in envs:
            env.slow_down(0.005)

        def write() -> None:
            put(store, range(200 * 2 * PER_BLOCK))
            store.commit(b"")

        spent = seconds_of(write)
        writes = [env.counts()["write"] - count for env, count in zip(envs, before, strict=True)]
        for env in envs:
            env.heal()
    assert max(writes) - min(writes) <= 2  # the manifest's, too
    return spent


def test_writes_of_two_devices_add_up():
    ratios = []
    for _ in range(5):
        ratios.append(timed_writes(1) / timed_writes(2))
        if ratios[-1] >= 1.8:
            return
    pytest.fail(f"two devices are only {max(ratios):.2f} times as fast as one")


def test_a_slow_device_does_not_hold_up_the_other():
    """While the slow device has its queue full, the other one serves all of its requests."""
    slow, fast = slow_devices(2, 4)
    with open_on(striped([slow, fast]), replace(CONFIG, segment_bytes=64 << 20)) as store:
        put(store, range(80 * 5 * PER_BLOCK))
        store.commit(b"")
        slow.slow_down(0.1)
        fast.slow_down(0.001)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(check, store, np.arange(80) * 5 * PER_BLOCK)
            while fast.counts().get("read", 0) < 40:
                assert not reading.done()
            assert slow.counts()["read"] < 40
            reading.result()
    assert [env.most_at_once() for env in (slow, fast)] == [4, 4]
