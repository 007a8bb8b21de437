"""Random sequences of put, get, commit, close and reopen against a dictionary, for every engine."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.store.store_model import CAP, ROW_BYTES, TABLES, get, make_rows, put, stored_ids
from tierstore.keys import MAX_ID, make_keys
from tierstore.store import open_store

TABLE_INDICES = st.sampled_from(list(ROW_BYTES))
ID_LISTS = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**32, MAX_ID])), unique=True, max_size=60
)
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder where fsync costs nothing: these sequences are about the order of calls, not about the device."""


class StoreMachine(RuleBasedStateMachine):
    """A store beside ``newest``, and beside ``committed``, which is what a reopened one must hold."""

    engine: str

    @initialize()
    def create(self):
        self.path = tempfile.mkdtemp(prefix="tierstore-test-", dir=IN_MEMORY)
        self.newest: dict[tuple[int, int], int] = {}
        self.committed: dict[tuple[int, int], int] = {}
        self.meta = b""
        self.version = self.number = 0
        self.open()

    def open(self):
        self.store = open_store(self.path, self.engine, TABLES, CAP)
        assert self.store.meta() == self.meta

    @rule(table=TABLE_INDICES, ids=ID_LISTS)
    def write(self, table, ids):
        self.version += 1
        put(self.store, table, ids, self.version)
        self.newest.update({(table, i): self.version for i in ids})

    @rule(table=TABLE_INDICES, ids=ID_LISTS)
    def read(self, table, ids):
        found, out = get(self.store, table, ids)
        assert found.tolist() == [(table, i) in self.newest for i in ids]
        for row, (i, there) in enumerate(zip(ids, found, strict=True)):
            if there:
                expected = make_rows(make_keys(table, [i]), ROW_BYTES[table], self.newest[table, i])
                assert np.array_equal(out[row], expected[0])

    @rule(table=TABLE_INDICES)
    def list_keys(self, table):
        assert stored_ids(self.store, table) == sorted(i for t, i in self.newest if t == table)

    @rule(meta=st.binary(max_size=50))
    def commit(self, meta):
        number = self.store.commit(meta)
        assert number > self.number
        self.number, self.meta, self.committed = number, meta, dict(self.newest)

    @rule()
    def reopen(self):
        self.store.close()
        self.newest = dict(self.committed)
        self.open()

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


def test_against_a_dictionary(engine):
    machine = type("Machine", (StoreMachine,), {"engine": engine})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None, derandomize=False)
    )
