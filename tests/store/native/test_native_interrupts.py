"""Signals during long native calls: handlers run within the call, and what they raise ends it cleanly."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.store.store_model import CAP, TABLES, assert_holds, get, put
from tierstore import _core
from tierstore.errors import ClosedError
from tierstore.keys import make_keys
from tierstore.store.native import NativeConfig, NativeStore

# Slow enough that each call below would take minutes; the tests do not measure, they would just not end.
SLOW = 0.2
pytestmark = pytest.mark.timeout(60)


class Alarm(BaseException):
    """What the handler raises: nothing in the library expects it."""


@contextmanager
def alarm(handler, seconds: float = 0.3, again: float = 0.0):
    """``handler`` is called once or every ``again`` seconds."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ring() -> None:
    raise Alarm


@pytest.fixture
def opened(tmp_path):
    """``opened(env, **config)``: the test's own store."""
    stores = []

    def make(env: _core.Env | None = None, **config) -> NativeStore:
        stores.append(
            NativeStore(tmp_path, TABLES, config=NativeConfig(**{"cap_bytes": CAP, **config}), env=env)
        )
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def env(tmp_path):
    env = _core.FaultEnv(_core.posix_env(str(tmp_path)))
    yield env
    env.heal()


IDS = range(0, 400_000, 40)  # each in a block of its own


def filled(opened, env, versions: int = 1, **config) -> NativeStore:
    store = opened(env, **config)
    for version in range(versions):
        put(store, 1, IDS, version)
        store.commit(b"%d" % version)
    return store


def go_on(store: NativeStore, opened, version: int) -> None:
    """The store can still do everything, and what it commits is what the next opening finds."""
    put(store, 1, range(100), 99)
    store.commit(b"after")
    assert_holds(store, 1, range(100), 99)
    store.close()
    again = opened()
    assert again.meta() == b"after"
    assert_holds(again, 1, range(100), 99)
    assert_holds(again, 1, [id for id in IDS if id >= 100], version)


def wait_for_writes(env: _core.FaultEnv) -> None:
    """Waits until the store writes nothing beside its calls."""
    before = {}
    while before != (before := env.counts()):
        time.sleep(0.1)


def begin_commit(thread: threading.Thread, env: _core.FaultEnv) -> None:
    """Starts a thread that commits, and waits until it is at its first file."""
    before = env.counts()["sync"]
    thread.start()
    while env.counts()["sync"] == before:
        time.sleep(0.01)


@pytest.mark.parametrize("count", [3000, 10_000])
def test_read(opened, env, count):
    """Of few rows, which begins on the calling thread, and of many."""
    store = filled(opened, env)
    store.close()
    store = opened(env)
    env.slow_down(SLOW * 5)
    keys = make_keys(1, np.random.default_rng(1).choice(np.asarray(IDS), count, replace=False))
    before = store.stats()
    with alarm(ring), pytest.raises(Alarm):
        store.read(keys, np.zeros((count, 272), np.uint8))
    env.heal()
    assert store.stats().read_rows == before.read_rows
    assert_holds(store, 1, IDS)
    go_on(store, opened, 0)


def test_write(opened, env):
    store = filled(opened, env, write_buffer_bytes=1 << 20, cap_bytes=64 << 20)
    env.slow_down(SLOW * 5)
    with alarm(ring), pytest.raises(Alarm):
        put(store, 1, range(1_000_000, 1_100_000), 5)
    env.heal()
    found, _ = get(store, 1, range(1_000_000, 1_100_000))
    stored = int(found.sum())
    assert found[:stored].all()  # a leading part
    assert_holds(store, 1, range(1_000_000, 1_000_000 + stored), 5)
    go_on(store, opened, 0)


def test_commit(opened, env):
    """It was made or not, and the list of commits tells."""
    store = filled(opened, env, segment_bytes=128 << 10)
    put(store, 1, IDS, 1)
    env.slow_down(SLOW)
    with alarm(ring), pytest.raises(Alarm):
        store.commit(b"1")
    env.heal()
    made = store.commits()[-1].meta
    assert made in (b"0", b"1")
    store.commit(b"2")
    assert store.meta() == b"2"
    go_on(store, opened, 1)


def test_a_commit_that_was_interrupted_between_syncs_loses_nothing(tmp_path):
    """Files that an interrupted commit has not synced are synced by the next one."""
    memory = _core.MemoryEnv()
    fault = _core.FaultEnv(memory)
    config = NativeConfig(CAP, segment_bytes=128 << 10)
    for seconds in np.linspace(0.02, 0.6, 8):
        store = NativeStore(Path("disk"), TABLES, config=config, env=fault)
        put(store, 1, IDS, int(seconds * 1000))
        fault.slow_down(0.03)
        with suppress(Alarm), alarm(ring, seconds):
            store.commit(b"first")
        fault.heal()
        store.commit(b"%d" % int(seconds * 1000))
        after = memory.after_crash(memory.operations(), "lost")
        store.close()
        with NativeStore(Path("disk"), TABLES, config=config, env=after) as found:
            assert found.meta() == b"%d" % int(seconds * 1000)
            assert_holds(found, 1, IDS, int(seconds * 1000))


def test_compact(opened, env):
    store = filled(opened, env, 6, segment_bytes=128 << 10)
    env.slow_down(SLOW)
    with alarm(ring), pytest.raises(Alarm):
        store.compact()
    env.heal()
    assert_holds(store, 1, IDS, 5)
    go_on(store, opened, 5)


@pytest.mark.parametrize("rows", [1, 1 << 40], ids=["snapshot", "footers"])
def test_opening(opened, env, rows):
    filled(opened, env, 6, segment_bytes=128 << 10, snapshot_min_rows=rows).close()
    env.slow_down(SLOW)
    with alarm(ring), pytest.raises(Alarm):
        opened(env, snapshot_min_rows=rows)
    env.heal()
    store = opened(env, snapshot_min_rows=rows)
    assert store.meta() == b"5"
    go_on(store, opened, 5)


@pytest.mark.parametrize("name", ["keys", "write", "commit", "reserve", "drop_commit"])
def test_waiting_for_another_call(opened, env, name):
    """Another thread's call is under way, and takes long."""
    store = filled(opened, env, 2, keep=5, segment_bytes=128 << 10)
    put(store, 1, IDS, 1)
    wait_for_writes(env)  # the commit would wait for each of them
    calls = {
        "keys": lambda: list(store.keys(1)),
        "write": lambda: put(store, 1, range(5), 9),
        "commit": store.commit,
        "reserve": lambda: store.reserve(1, 5),
        "drop_commit": lambda: store.drop_commit(1),
    }
    env.slow_down(SLOW * 5)
    other = threading.Thread(target=lambda: store.commit(b"other"))
    begin_commit(other, env)
    with alarm(ring), pytest.raises(Alarm):
        calls[name]()
    assert other.is_alive()
    env.heal()
    other.join()
    assert store.commits()[-1].meta == b"other"
    go_on(store, opened, 1)


@pytest.mark.parametrize("name", ["stats", "commits", "meta"])
def test_what_does_not_wait_for_a_commit(opened, env, name):
    """Nor do other Python threads wait for who asks."""
    store = filled(opened, env, segment_bytes=128 << 10)
    put(store, 7, range(10_000))  # new rows, so that there is nothing to compact beside the commit
    wait_for_writes(env)
    env.slow_down(SLOW * 5)
    commit = threading.Thread(target=lambda: store.commit(b"other"))
    begin_commit(commit, env)
    getattr(store, name)()
    assert commit.is_alive()
    assert store.meta() == b"0"
    env.heal()
    commit.join()
    assert store.meta() == b"other"


def test_handlers_that_do_not_raise_run_within_the_call(opened, env):
    """Every 50 ms, and the call ends all the same, with all of its effect."""
    store = filled(opened, env)
    store.close()
    store = opened(env)
    env.slow_down(0.05)
    some = IDS[:1500]
    served = []
    with alarm(lambda: served.append(1), 0.05, 0.05):
        assert_holds(store, 1, some)
        put(store, 1, some, 3)
        store.commit(b"3")
    assert served
    env.heal()
    assert_holds(store, 1, some, 3)
    assert store.meta() == b"3"


def test_handlers_may_use_the_store(opened, env):
    """As one of SIGTERM does that commits before the process ends."""
    store = filled(opened, env, segment_bytes=128 << 10, write_buffer_bytes=1 << 20, cap_bytes=64 << 20)
    made = []

    def handler() -> None:
        assert_holds(store, 1, range(0, 4000, 40))
        store.stats()
        put(store, 7, range(10), 4)
        made.append(store.commit(b"by the handler"))

    for call in (lambda: put(store, 1, range(1_000_000, 1_020_000), 5), lambda: assert_holds(store, 1, IDS)):
        env.slow_down(0.03)
        with alarm(handler, 0.25):
            call()
        env.heal()
        assert store.commits()[-1].id == made[-1]
    assert len(made) == 2
    assert_holds(store, 1, range(1_000_000, 1_020_000), 5)
    go_on(store, opened, 0)


def test_a_second_signal_while_the_call_ends(opened, env):
    store = filled(opened, env, segment_bytes=128 << 10)
    put(store, 1, IDS, 1)
    env.slow_down(SLOW * 5)
    with alarm(ring, 0.3, 0.2), pytest.raises(Alarm):
        store.commit(b"1")
    env.heal()
    go_on(store, opened, 1)


def test_verify(tmp_path, opened, env):
    filled(opened, env, 3, segment_bytes=128 << 10).close()
    env.slow_down(SLOW)
    with alarm(ring), pytest.raises(Alarm):
        _core.verify_store(str(tmp_path), {}, None, env)
    env.heal()
    assert _core.verify_store(str(tmp_path), {}, None, env).findings_total == 0


def test_closing_from_a_handler_ends_the_call(opened, env):
    store = filled(opened, env, segment_bytes=128 << 10)
    env.slow_down(SLOW)
    closing = threading.Thread(target=store.close)

    def write() -> None:
        for _ in range(1000):
            put(store, 1, IDS, 1)
            store.commit(b"1")

    with alarm(closing.start), pytest.raises(ClosedError):
        write()
    env.heal()
    store.close()  # beside the other one
    closing.join()
    assert get(opened(), 1, IDS)[0].all()
