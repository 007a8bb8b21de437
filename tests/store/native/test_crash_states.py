"""Every state in which a crash can leave the disk reopens at exactly the last commit.

A workload runs on the file system in memory, which records its operations. A crash image is a prefix of them
with any of the unsynced ones lost, and writes among those torn. TIERSTORE_CRASH_STATES says how many, for a
store on one device and for a store that grows to three. There one device may keep all and the others nothing.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from tests.store.store_model import use_compact_index
from tierstore import _core
from tierstore.errors import StoreFullError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeLimits, NativeStore

STATES = int(os.environ.get("TIERSTORE_CRASH_STATES", "2400"))
WORKLOADS = max(8, STATES // 2000)
TABLES = (StoredTable("a", 0, 1 << 40, 4, 16), StoredTable("b", 1, 1 << 40, 64, 272))
ROW_BYTES = {0: 16, 1: 272}
IDS = {0: 900, 1: 160}
BLOCK = {0: 128, 1: 14}
"""Rows of a block. Two blocks are a chunk here, three a segment: sizes like these end where those do."""
LIMITS = NativeLimits(chunk_bytes=8192, replay_rows=1)
SHORT, PLENTY = 360_000, 4 << 20
State = dict[tuple[int, int], int]


@dataclass(frozen=True)
class Kept:
    """A kept commit: its meta and what it must hold."""

    meta: bytes
    rows: State


@dataclass(frozen=True)
class Event:
    """A commit or a drop: the operations before and behind the call, and what is kept then, by id."""

    begun: int
    done: int
    kept: dict[int, Kept]


def rows_of(table: int, ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(ids), ROW_BYTES[table] // 8), np.uint64)
    rows[:, 0] = versions
    rows[:, -1] = ids * 1_000_003 + versions
    return rows.view(np.uint8)


FOLDERS = ("disk", "more", "most")


def devices_of(env, devices: int):
    """The Env of a store on so many devices; stripes are as long as chunks."""
    if devices == 1:
        return env
    return _core.StripedEnv([(env, folder) for folder in FOLDERS[:devices]], LIMITS.chunk_bytes)


def open_on(env, keep: int, at: int = 0, devices: int = 1) -> NativeStore:
    # With keep=2 the index is saved as often as can be. With keep=1 space is short, so that compaction goes
    # on within what the last commit keeps.
    rows = 1 if keep == 2 else 1 << 20
    config = NativeConfig(
        cap_bytes=SHORT if keep == 1 else 600_000 * (keep + 1) ** 2,
        segment_bytes=16_384,
        keep=keep,
        at=at,
        snapshot_min_rows=rows,
        limits=LIMITS,
    )
    return NativeStore("disk", TABLES, config=config, env=devices_of(env, devices))


def contents(store: NativeStore) -> State:
    """All rows with their versions, read back and compared with what keys() lists."""
    state: State = {}
    for table in ROW_BYTES:
        ids = np.arange(IDS[table])
        out = np.zeros((len(ids), ROW_BYTES[table]), np.uint8)
        found = store.read(make_keys(table, ids), out)
        versions = out.view(np.uint64)[:, 0]
        assert np.array_equal(out[found], rows_of(table, ids[found], versions[found]))
        state.update(zip([(table, i) for i in ids[found].tolist()], versions[found].tolist(), strict=True))
        listed = [int(key) & ((1 << 48) - 1) for chunk in store.keys(table) for key in chunk]
        assert sorted(listed) == ids[found].tolist()
    return state


def write_some(store: NativeStore, rng: random.Random, rows: State, version: int) -> None:
    table = rng.choice([0, 1, 1])
    count = rng.choice(
        [rng.randint(1, IDS[table] // 2), rng.randint(1, 3) * BLOCK[table] + rng.randint(-1, 1)]
    )
    ids = np.array(rng.sample(range(IDS[table]), count))
    new = rows_of(table, ids, np.full(len(ids), version))
    try:
        store.write(make_keys(table, ids), new)
    except StoreFullError:
        store.set_cap(PLENTY)
        store.write(make_keys(table, ids), new)
    rows.update({(table, i): version for i in ids.tolist()})


RENEWED = []
"""Times that a last commit was written anew, by workload."""


def run_workload(env, seed: int, keep: int, most: int = 1) -> list[Event]:
    """Random writes, commits (with tags), drops, compactions, reopenings, also at older commits, and with
    more devices, up to ``most``."""
    rng = random.Random(seed)
    devices = min(most, 1 + seed % 2)
    store, rows, renewed = open_on(env, keep, devices=devices), {}, 0
    events = [Event(0, 0, {})]
    for step in range(40):
        write_some(store, rng, rows, step + 1)
        kept, begun = dict(events[-1].kept), env.operations()
        action = rng.random()
        if action < 0.35:
            meta = b"step %d" % step
            tag = "" if any(commit.tag for commit in store.commits()) else rng.choice(["", "", "tag"])
            kept[store.commit(meta, tag)] = Kept(meta, dict(rows))
            kept = {commit.id: kept[commit.id] for commit in store.commits()}
            if keep == 1:
                store.set_cap(SHORT)
            events.append(Event(begun, env.operations(), kept))
        elif action < 0.45:
            at = rng.choice([0, 0, *kept])
            renewed += store.counters()["renewed_commits"]
            store.close()
            devices = rng.randint(devices, most) if most > 1 else 1
            store = open_on(env, keep, at, devices)
            rows = dict(kept[at or max(kept)].rows) if kept else {}
        elif action < 0.55:
            store.compact()
        elif action < 0.65 and len(kept) > 1:
            dropped = rng.choice(sorted(kept)[:-1])
            store.drop_commit(dropped)
            del kept[dropped]
            events.append(Event(begun, env.operations(), kept))
    RENEWED.append(renewed + store.counters()["renewed_commits"])
    store.close()
    return events


def check_image(
    image, at: int, events: list[Event], keep: int, rng: random.Random, go_on: bool, devices: int = 1
) -> None:
    """The image holds just what was kept before the crash, or by the call that was under way."""
    with open_on(image, keep, devices=devices) as store:
        found = {commit.id: commit.meta for commit in store.commits()}
        allowed = [
            event.kept
            for i, event in enumerate(events)
            if event.begun <= at and not (events[i + 1 :] and events[i + 1].done <= at)
        ]
        (kept,) = [k for k in allowed if {id: commit.meta for id, commit in k.items()} == found]
        last = kept[max(kept)] if kept else Kept(b"", {})
        assert store.meta() == last.meta
        assert contents(store) == last.rows
    report = _core.verify_store("disk", ROW_BYTES, None, devices_of(image, devices))
    assert [(item.file, item.what) for item in report.findings] == []
    if not go_on:
        return
    number = rng.choice([0, *kept])
    rows = dict(kept[number].rows if number else last.rows)
    with open_on(image, keep, number, devices) as store:
        assert contents(store) == rows
        for version in range(100, 106):
            write_some(store, rng, rows, version)
        store.commit(b"went on")
    with open_on(image, keep, devices=devices) as store:
        assert store.meta() == b"went on"
        assert contents(store) == rows


@pytest.mark.parametrize(("index", "devices"), [("hash", 1), ("compact", 1), ("hash", 3)])
@pytest.mark.parametrize("seed", range(WORKLOADS))
def test_crash_states(seed, index, devices, monkeypatch):
    if index == "compact":
        use_compact_index(monkeypatch)
    env, keep = _core.MemoryEnv(), 1 + seed % 3
    events = run_workload(env, seed, keep, devices)
    operations = env.operations()
    assert len(events) > 3
    rng = random.Random(seed + STATES)
    for number in range(STATES // WORKLOADS // 2):
        # The moments around commits are the interesting ones.
        near = rng.choice(events[1:])
        at = rng.choice([rng.randint(0, operations), rng.randint(near.begun, near.done)])
        unsynced = rng.choice(["lost", "kept", "random", "random", "random"])
        keeps = rng.choice(["", *FOLDERS]) if devices > 1 else ""
        image = env.after_crash(at, unsynced, rng.getrandbits(64), keeps)
        check_image(image, at, events, keep, rng, number % 5 == 0, devices)


@pytest.mark.parametrize("cap", [250_000, 300_000, 420_000, 470_000])
def test_workloads_meet_what_is_rare(cap, monkeypatch):
    """The last commit is written anew in some workloads, and compaction ends however short the space is."""
    monkeypatch.setattr(sys.modules[__name__], "SHORT", cap)
    RENEWED.clear()
    for seed in range(0, 15, 3):
        run_workload(_core.MemoryEnv(), seed, 1)
    assert sum(RENEWED) > 5
