"""Random orders of what happens to rows while a thread reads ahead: no row is ever old, and no call hangs."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.cache.read_ahead_rig import NEVER, ROW, Rig, within_patience
from tierstore import _core
from tierstore.cache.tiers.read_ahead import WINDOW_ROWS
from tierstore.errors import StoreIOError

KEYS = 120
LOOKUP = st.sets(st.integers(0, KEYS - 1), max_size=25)


class ReadAheadMachine(RuleBasedStateMachine):
    """Tiers above a store, as a tier group works with them, in few words. ``memory``: version by key of the
    rows in memory. ``stored`` by the rig. Lookups in ``window`` are announced."""

    @initialize(rows=st.sampled_from([200, 40, 7, 1]), asks=st.booleans(), stored=LOOKUP, seed=st.integers(0))
    def open(self, rows: int, asks: bool, stored: set[int], seed: int) -> None:
        self.rig, self.announces_all = Rig(rows), asks
        self.ahead = self.rig.ahead
        self.rig.store.version = dict.fromkeys(range(0, KEYS, 2), 1) | dict.fromkeys(stored, 1)
        self.rig.store.go.set()
        self.random = np.random.default_rng(seed)
        self.scatter = self.random.permutation(KEYS).tolist()
        self.rig.store.place = self.place  # type: ignore[method-assign]
        self.memory: dict[int, int] = {}
        self.rig.resident = self.memory.keys()  # type: ignore[assignment]
        self.window: deque[tuple[int, set[int]]] = deque()
        self.next_seq, self.clock, self.queued = 0, 1, 0

    def place(self, key: int) -> int:
        return self.scatter[key] << 40 if key in self.rig.store.version else (1 << 64) - 1

    def next_use(self, key: int) -> int:
        return next((seq for seq, keys in self.window if key in keys), NEVER)

    # -- lookups ---------------------------------------------------------------------------------

    def announce(self, keys: set[int]) -> bool:
        """As a window tells it: the keys that no lookup of it has yet, without those that a tier has that
        knows their next use."""
        new = [
            key
            for key in keys
            if self.next_use(key) == NEVER and (self.announces_all or key not in self.memory)
        ]
        if len(self.rows_of_window() | keys) > WINDOW_ROWS * self.ahead.max_rows:
            return False
        self.window.append((self.next_seq, keys))
        self.rig.announce(self.next_seq, *new)
        self.next_seq += 1
        return True

    def rows_of_window(self) -> set[int]:
        return set[int]().union(*(keys for _, keys in self.window))

    @rule(steps=st.integers(1, 15), ahead=st.integers(1, 12), size=st.integers(3, 20), slow=st.booleans())
    def train(self, steps: int, ahead: int, size: int, slow: bool) -> None:
        """Each lookup is planned when ``ahead`` lookups are announced, or as many as a window may have."""
        for _ in range(steps):
            while len(self.window) <= ahead and self.announce(
                set(self.random.integers(0, KEYS, size).tolist())
            ):
                pass
            self.plan(slow)

    def plan(self, slow: bool) -> None:
        """Where the store is slow, it is still reading when the plan waits."""
        if not self.window:
            return
        seq, keys = self.window.popleft()
        if slow:
            self.rig.store.go.clear()
        self.rig.begin(seq)
        opening = threading.Timer(0.001, self.rig.store.go.set)
        opening.start()
        within_patience(lambda seq=seq: self.ahead.wait(seq))
        self.bring(keys, len(self.memory) // 2)
        opening.join()

    @rule(keys=LOOKUP, evicted=st.integers(0, KEYS))
    def plan_on_demand(self, keys: set[int], evicted: int) -> None:
        """A lookup of evaluation, in the middle of a window."""
        seq = max(0, self.next_seq - len(self.window) - 1)
        self.rig.begin(seq)
        within_patience(lambda: self.ahead.wait(seq))
        self.bring(keys, evicted)

    def bring(self, keys: set[int], evicted: int) -> None:
        """Bring rows into memory in place of others. Rows that are read ahead have the store's version."""
        missing = sorted(key for key in keys if key not in self.memory)
        with self.rig.lock:
            found = self.rig.find(*missing)
            assert found == {key: self.rig.store.version[key] for key in found}
            others = [key for key in self.memory if key not in keys]
            self.evict(self.random.permutation(others)[:evicted].tolist())
            assert self.rig.find(*missing) == found  # nobody else has got their memory
            self.memory.update((key, self.rig.store.version.get(key, 0)) for key in missing)
            self.rig.take(*missing)

    def evict(self, keys: list[int]) -> None:
        """Some were changed: they are written. All are offered to be kept, those used last first."""
        changed = [key for key in keys if key not in self.rig.store.version or self.random.random() < 0.5]
        self.write(changed)
        keys.sort(key=self.next_use, reverse=True)
        versions = np.array([self.rig.store.version[key] for key in keys], np.uint8)
        rows = np.repeat(versions[:, None], ROW, 1)
        uses = np.array([self.next_use(key) for key in keys], np.int64)
        for key in keys:
            del self.memory[key]
        self.ahead.keep(np.array(keys, np.uint64), np.ascontiguousarray(rows), None, uses)

    def write(self, keys: Any) -> None:
        self.clock = self.clock % 250 + 1
        self.rig.overwrite(self.clock, *keys)

    # -- what happens beside lookups -------------------------------------------------------------

    @rule(keys=LOOKUP)
    def overwrite(self, keys: set[int]) -> None:
        """A commit writes rows that stay in memory; rows that are not in memory are loaded into the store."""
        with self.rig.lock:
            keys |= set(self.random.permutation(list(self.rig.find(*range(KEYS))))[:9].tolist())
            self.write(keys)
            self.memory.update((key, self.clock) for key in keys & self.memory.keys())

    @rule(really=st.sampled_from([False, False, True]))
    def forget(self, really: bool) -> None:
        if not really:
            return
        with self.rig.lock:
            self.ahead.forget()
        self.window.clear()

    @rule()
    def reads_fail(self) -> None:
        self.rig.store.error = StoreIOError("the disk is gone")
        self.train(2, 4, 9, slow=False)
        self.rig.store.error = None

    # -- what holds always -----------------------------------------------------------------------

    @invariant()
    def rows_are_the_stores_rows(self) -> None:
        if not hasattr(self, "rig"):
            return
        with self.rig.lock:
            here = self.rig.find(*(key for key in range(KEYS) if key not in self.memory))
            assert here == {key: self.rig.store.version[key] for key in here}
            assert self.rig.find(*self.memory) == {}  # no room is lost to rows that no plan will ask for
            held = self.ahead._rows
            assert held is None or len(held) <= held.capacity == self.ahead.max_rows
            # Entries of the sweep may be there twice: of rows that were forgotten and announced again.
            most = self.rig.max_bytes + 2 * KEYS * _core.Sweep.BYTES_PER_ENTRY
            assert 0 <= self.ahead.memory_bytes() <= most

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        while self.window:
            self.plan(slow=False)
        self.rig.wait_idle()
        with self.rig.lock:
            self.ahead.forget()
            assert self.ahead.memory_bytes() == 0
        self.rig.close()


TestReadAheadMachine = ReadAheadMachine.TestCase
TestReadAheadMachine.settings = settings(
    deadline=None, max_examples=40, stateful_step_count=20, suppress_health_check=list(HealthCheck)
)
