"""A store whose reads can be held up, and a ReadAhead on it, for the tests of reading ahead."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tierstore import _core
from tierstore.cache.tiers.read_ahead import ReadAhead, bytes_per_row
from tierstore.errors import StoreIOError
from tierstore.store.protocol import NOWHERE

ROW = 16
HELD = ROW + _core.HeldRows.BYTES_PER_ROW
NEVER = np.iinfo(np.int64).max
PATIENCE = 20.0  # seconds after which a call hangs


def keys_of(keys: Any) -> Any:
    return np.array(list(keys), np.uint64)


class Store:
    """Rows that all hold their version, at places against the order of keys; reads wait for ``go``."""

    def __init__(self) -> None:
        self.version: dict[int, int] = {key: 1 for key in range(0, 1000, 2)}
        self.asked: list[list[int]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.looked_up = threading.Event()  # places wait for it
        self.looked_up.set()
        self.error: BaseException | None = None

    def places(self, keys: Any) -> Any:
        assert self.looked_up.wait(PATIENCE)
        return np.array([self.place(key) for key in keys.tolist()], np.uint64)

    def place(self, key: int) -> int:
        return 2000 - key if key in self.version else NOWHERE

    def read(self, keys: Any, out: Any, slots: Any = None) -> Any:
        """Take the versions at the beginning, and the time after that: what is written then is newer."""
        self.asked.append(keys.tolist())
        versions = [self.version.get(key) for key in keys.tolist()]
        self.begun.set()
        assert self.go.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        for slot, version in zip(
            range(len(keys)) if slots is None else slots.tolist(), versions, strict=True
        ):
            if version is not None:
                out[slot] = version
        return np.array([version is not None for version in versions], bool)


class Rig:
    """A ReadAhead with room for some ``rows``, over a store of random places."""

    def __init__(self, rows: int = 80) -> None:
        self.store = Store()
        self.lock = threading.RLock()
        self.resident: set[int] = set()
        self.max_bytes = math.ceil(rows * bytes_per_row(ROW))
        store: Any = self.store
        self.ahead = ReadAhead(store, ROW, self.max_bytes, self.lock, self._resident)

    def _resident(self, keys: Any) -> Any:
        return np.array([key in self.resident for key in keys.tolist()], bool)

    def announce(self, seq: int, *keys: int) -> None:
        with self.lock:
            self.ahead.announce(seq, keys_of(keys))

    def begin(self, seq: int) -> None:
        with self.lock:
            self.ahead.lookup_begun(seq)

    def find(self, *keys: int) -> dict[int, int]:
        """Versions by key of those that are to be had."""
        with self.lock:
            held = self.ahead.find(keys_of(keys))
            if held is None:
                return {}
            slots, rows = held
            return {
                key: int(rows[slot, 0]) for key, slot in zip(keys, slots.tolist(), strict=True) if slot >= 0
            }

    def keep(self, version: int, uses: dict[int, int]) -> None:
        """The rows of these keys leave memory in this version; they are used next by these lookups."""
        self.overwrite(version, *uses)
        rows = np.full((len(uses), ROW), version, np.uint8)
        with self.lock:
            self.ahead.keep(keys_of(uses), rows, None, np.array(list(uses.values())))

    def overwrite(self, version: int, *keys: int) -> None:
        with self.lock:
            self.ahead.rows_overwritten(keys_of(keys))
            self.store.version.update((key, version) for key in keys)

    def take(self, *keys: int) -> None:
        """A lookup has brought these rows into memory."""
        with self.lock:
            self.ahead.lookup_filled(keys_of(keys), len(keys))

    def plan(self, seq: int, *keys: int) -> dict[int, int]:
        """Lookup ``seq`` lacks these rows; return what it finds read ahead."""
        self.begin(seq)
        within_patience(lambda: self.ahead.wait(seq))
        found = self.find(*keys)
        self.take(*keys)
        return found

    def asked(self) -> list[int]:
        return [key for keys in self.store.asked for key in keys]

    def held_bytes(self, rows: int) -> int:
        """What so many rows take, when nothing is left to read."""
        return int(rows * HELD)

    def wait_idle(self) -> None:
        """Wait until the threads have ended, or wait themselves."""
        ahead = self.ahead

        def idle() -> bool:
            with self.lock:
                waiting: Any = ahead._changed._waiters  # type: ignore[attr-defined]
                return len(waiting) >= len(ahead._threads)

        wait_for(idle)

    def fail_reads(self) -> None:
        self.store.error = StoreIOError("the disk is gone")

    def close(self) -> None:
        self.store.go.set()
        within_patience(self.ahead.close)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def within_patience(call: Callable[[], Any]) -> None:
    """Run ``call`` in another thread, to fail when it hangs; what it raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "hangs"
    if failures:
        raise failures[0]
