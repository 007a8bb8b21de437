"""Stores whose last commit has a meta that no module has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierstore import StoreMismatchError, TierConfig, TieredEmbedding, optim
from tierstore.store import open_store

FOREIGN = [
    b"my own bytes",
    b"\xff\xfe",
    b"[1, 2]",
    b"null",
    b"5",
    b"[" * 100_000,
    b'{"updates": "many"}',
    b'{"updates": {"t": "many"}}',
    b'{"updates": {"t": -1}}',
    b'{"checkpoint": 5}',
    b'{"versions": 7}',
]


def build(path: Path) -> TieredEmbedding:
    config = TierConfig(hbm="64KiB", ssd="64MiB", path=path)
    return TieredEmbedding(1000, 4, config=config, optimizer=optim.SGD(lr=0.1), name="t")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    table = build(tmp_path)
    table.load_rows(torch.arange(9), torch.ones(9, 4))
    table.commit({"step": 3}, tag="own")
    table.close()
    return tmp_path


@pytest.mark.parametrize("meta", FOREIGN, ids=[meta[:30].decode("latin1") for meta in FOREIGN])
def test_a_module_refuses_the_store_and_leaves_it_free(meta: bytes, stored: Path) -> None:
    with open_store(stored) as store:
        store.commit(meta)
    with pytest.raises(StoreMismatchError, match="no module has written") as raised:
        build(stored)
    assert "open_store" in str(raised.value)
    with open_store(stored) as store:  # not locked by the module that was refused
        assert store.meta() == meta
        assert sum(len(keys) for keys, _ in store.scan()) == 9


def test_another_programs_plain_values_do_no_harm(stored: Path) -> None:
    with open_store(stored) as store:
        store.commit(b'{"mine": 1}')
    table = build(stored)
    assert table.engine.committed_extra() == {}
    assert table.rows(torch.arange(9)).equal(torch.ones(9, 4))
    table.close()
