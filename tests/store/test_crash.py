"""Processes killed with SIGKILL while they write: the store reopens at the last commit, whole."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np

from tests.store.store_model import CAP, TABLES, assert_holds, put, run_child, stored_ids
from tierstore.store import RowStore, open_store

KILLS = 5
BATCHES = 4
ROWS = 400


def batch(step: int, number: int) -> tuple[int, np.ndarray]:
    """Table and ids that batch ``number`` before commit ``step`` writes, all in version ``step``."""
    rng = np.random.default_rng([step, number])
    return int(rng.choice([1, 7, 65535])), rng.choice(3000, ROWS, replace=False)


def write_for_ever(path: str, engine: str) -> None:
    """Goes on from the last commit, and prints the number of every step when it is committed."""
    with open_store(path, engine, TABLES, CAP) as store:
        step = int(store.meta() or b"0")
        while True:
            step += 1
            for number in range(BATCHES):
                put(store, *batch(step, number), version=step)
            store.commit(b"%d" % step)
            print(step, flush=True)


def assert_is_commit(store: RowStore, step: int) -> None:
    """The store holds exactly what ``step`` steps wrote."""
    versions: dict[int, dict[int, int]] = {1: {}, 7: {}, 65535: {}}
    for past in range(1, step + 1):
        for number in range(BATCHES):
            table, ids = batch(past, number)
            versions[table].update(dict.fromkeys(ids.tolist(), past))
    for table, newest in versions.items():
        assert stored_ids(store, table) == sorted(newest)
        for version in set(newest.values()):
            assert_holds(store, table, [i for i, v in newest.items() if v == version], version)


def test_killed_at_random_moments(tmp_path, engine):
    path, pause = tmp_path / "store", random.Random(os.urandom(8))
    code = "import sys; from tests.store import test_crash; test_crash.write_for_ever(*sys.argv[1:])"
    step = 0
    for _ in range(KILLS):
        child = run_child(code, path, engine)
        with child:
            printed = child.stdout.readline()  # it works now
            time.sleep(pause.uniform(0, 0.15))
            child.send_signal(signal.SIGKILL)
            printed += child.stdout.read()
        assert child.returncode == -signal.SIGKILL
        with open_store(path, engine, TABLES, CAP) as store:
            reached = int(store.meta())
            assert reached >= int(printed.split("\n")[-2]) > step
            assert_is_commit(store, reached)
        step = reached
