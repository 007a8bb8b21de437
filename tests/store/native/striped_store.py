"""A native store of small rows, striped over folders of environments that a test controls."""

from __future__ import annotations

import numpy as np

from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeLimits, NativeStore

TABLES = (StoredTable("a", 0, 1 << 40, 4, 16), StoredTable("b", 1, 1 << 40, 64, 272))
STRIPE = 8192
PER_BLOCK = 14  # rows of table 1; two blocks are a stripe
CONFIG = NativeConfig(
    cap_bytes=1 << 30, segment_bytes=256 << 10, limits=NativeLimits(chunk_bytes=STRIPE), queue_depth=4
)
FOLDERS = ("disk", "more", "most")
Pair = tuple[_core.Env, str]


def striped(envs: list[_core.Env]) -> _core.Env:
    return _core.StripedEnv(list(zip(envs, FOLDERS, strict=False)), STRIPE)


def open_on(env: _core.Env, config: NativeConfig = CONFIG, path: str = "disk") -> NativeStore:
    return NativeStore(path, TABLES, config=config, env=env)


def rows_of(keys: np.ndarray, version: int) -> np.ndarray:
    words = keys[:, None] * np.uint64(1_000_003) + np.arange(34, dtype=np.uint64)
    return (words + np.uint64(version)).view(np.uint8)


def put(store: NativeStore, ids, version: int = 0) -> None:
    keys = make_keys(1, ids)
    store.write(keys, rows_of(keys, version))


def check(store: NativeStore, ids, version: int = 0) -> None:
    keys = make_keys(1, ids)
    out = np.zeros((len(keys), 272), np.uint8)
    assert store.read(keys, out).all()
    assert np.array_equal(out, rows_of(keys, version))


def part_sizes(env: _core.MemoryEnv, name: str = "00000001.seg") -> list[int]:
    return [len(env.contents(f"{folder}/{name}")) for folder in FOLDERS if name in env.list(folder)]
