"""What every tier must do, of whatever kind; and lists of tiers that train as memory does, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bags import ROWS, SGD, Bags, budget, build, everything, random_batches, train
from tests.cache.remote_tier import RemoteSource, RemoteTier, register
from tierstore import TierConfig, optim, prefetch
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers import registry
from tierstore.cache.tiers.codec import Codec, converted
from tierstore.cache.tiers.memory import MemoryTier, TierPlan
from tierstore.cache.tiers.protocol import NEVER, MovingRows, Tier
from tierstore.cache.tiers.store import StoreTier
from tierstore.errors import StoreIOError, TierFullError
from tierstore.keys import make_keys
from tierstore.row_format import RowFormat
from tierstore.store.directory import open_store
from tierstore.store.protocol import StoredTable

ROW, DIM = 32, 8
ROOM = 20


def row_bytes(form: Codec | None) -> int:
    return ROW if form is None else form.row_bytes


def store(path: Path, form: Codec | None, engine: str) -> Tier:
    dtype, size = "fp32" if form is None else form.format.weights, row_bytes(form)
    specs = [
        StoredTable(f"t{i}", i, 1000, DIM, size, {"name": "sgd"}, 0, {"kind": "zeros"}, dtype)
        for i in range(2)
    ]
    return StoreTier("ssd", open_store(path / "rows", engine, specs), size, GroupStats(2), None, form)


def memory(_: Path, form: Codec | None, policy: str = "lru", **above: Any) -> Tier:
    codec = above.get("codec", form)
    plan = TierPlan(ROOM, False, codec=codec, leaving=form)
    return MemoryTier("uvm", plan, row_bytes(codec), policy, 2)


def first(_: Path, form: Codec | None) -> Tier:
    return MemoryTier("hbm", TierPlan(ROOM, False, leaving=form), ROW, "lookahead", 2, "always")


def remote(_: Path, form: Codec | None, kind: Callable[[], Tier]) -> Tier:
    made = kind()
    made.codec = made.leaving = form
    return made


KINDS: dict[str, Callable[[Path, Codec | None], Tier]] = {
    "memory": memory,
    "memory, s3_fifo": partial(memory, policy="s3_fifo"),
    "memory, above": partial(memory, codec=None),
    "first": first,
    "remote": partial(remote, kind=lambda: RemoteTier(ROOM)),
    "store": partial(store, engine="native"),
    "rocksdb": partial(store, engine="rocksdb"),
    "source": partial(remote, kind=lambda: RemoteSource({})),
}
FORMS = {
    "fp32": None,
    **{dtype: Codec(RowFormat(dtype), DIM, 0, [1, 2]) for dtype in ("bf16", "fp16", "int8")},
}
"""The form of the rows here, or in the tier below."""


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Codec | None:
    return FORMS[request.param]


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, form: Codec | None, tmp_path: Path) -> Any:
    made = KINDS[request.param](tmp_path, form)
    yield made
    made.close()
    if isinstance(made, StoreTier):
        made.store.close()


def moving(tier: Tier, ids: Any, value: int, dirty: Any = 1, table: int = 0) -> MovingRows:
    """Rows whose weights tell their ids and ``value``, in the form that the tier wants."""
    keys = make_keys(table, np.array(ids, np.int64))
    weights = np.full((len(keys), DIM), value, np.float32)
    weights[:, 0] = ids
    flags = np.broadcast_to(np.array(dirty, np.uint8), len(keys)).copy()
    rows = MovingRows(keys, weights.view(np.uint8), flags, np.full(len(keys), NEVER))
    return rows.converted(tier.codec)


def told(keys: Any, rows: Any, form: Codec | None) -> list[list[float]]:
    """The first two weights of rows in a form: the id and the value."""
    weights = converted(keys, np.ascontiguousarray(rows), form, None).view(np.float32)
    assert (weights[:, 2:] == weights[:, 1:2]).all()
    return weights[:, :2].tolist()


def find(tier: Tier, ids: Any, table: int = 0) -> dict[int, tuple[int, bool]]:
    """The values of rows that are here, by their ids, and whether they are dirty."""
    keys = make_keys(table, np.array(ids, np.int64))
    found = tier.find(keys)
    assert (tier.holds(keys) == found.here).all()
    dirty = np.zeros(len(keys), bool)
    if found.dirty is not None:
        dirty[found.here] = found.dirty
    values = {}
    for positions, rows, source in found.pieces:
        rows = told(keys[positions], rows if source is None else rows[source], found.codec)
        for i, row in zip(positions.tolist(), rows, strict=True):
            assert row[0] == ids[i]
            values[ids[i]] = int(row[1]), bool(dirty[i])
    assert found.here.sum() == len(values)
    return values


class Lower:
    """What a tier demotes, by ids."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.rows: dict[int, tuple[int, bool]] = {}

    def __call__(self, *parts: MovingRows) -> None:
        if self.refuses:
            raise StoreIOError(5, "the device refused")
        for part in parts:
            rows = told(part.keys, part.rows, part.codec)
            for key, row, dirty in zip(part.keys.tolist(), rows, part.dirty, strict=True):
                assert key not in self.rows
                assert row[0] == key
                self.rows[key] = int(row[1]), bool(dirty)


def refuse(*_: Any) -> None:
    raise StoreIOError(5, "the device refused")


def nothing_leaves(*_: Any) -> None:
    raise AssertionError("there is room")


def held(tier: Tier) -> list[int]:
    return sorted(int(key) for table in (0, 1) for keys in tier.keys(table) for key in keys)


def test_rows_come_back_as_they_were_put(tier: Tier) -> None:
    assert find(tier, [1, 2]) == {}
    tier.put(moving(tier, [3, 1], 7), 0, nothing_leaves)
    tier.put(moving(tier, [2], 8, table=1), 1, nothing_leaves)
    for _ in range(2):  # finding changes nothing
        assert find(tier, [0, 1, 2, 3]) == {1: (7, tier.exclusive), 3: (7, tier.exclusive)}
        assert find(tier, [1, 2], table=1) == {2: (8, tier.exclusive)}
    assert held(tier) == [1, 3, (1 << 48) + 2]
    assert [len(keys) for keys in tier.keys(0)] == [2]


def test_rows_that_are_taken_leave_exclusive_tiers_and_stay_in_lasting_ones(tier: Tier) -> None:
    tier.put(moving(tier, [1, 2, 3], 7), 0, nothing_leaves)
    found = tier.find(make_keys(0, np.array([2, 9])))
    tier.take(found)
    assert find(tier, [1, 2, 3]).keys() == ({1, 3} if tier.exclusive else {1, 2, 3})
    tier.put(moving(tier, [2], 8), 1, nothing_leaves)
    assert find(tier, [2]) == {2: (8, tier.exclusive)}


def test_clean_rows_are_clean_or_left_out(tier: Tier) -> None:
    tier.put(moving(tier, [1, 2, 3], 7, dirty=[0, 1, 0]), 0, nothing_leaves)
    exclusive = {1: (7, False), 2: (7, True), 3: (7, False)}
    assert find(tier, [1, 2, 3]) == (exclusive if tier.exclusive else {2: (7, False)})


def test_every_row_that_finds_no_room_goes_below_once(tier: Tier) -> None:
    lower = Lower()
    for seq, first in enumerate(range(0, 200, 50)):  # more than it has room for in one call
        ids = list(range(first, first + 50))
        tier.put(moving(tier, ids, seq + 1, dirty=[i % 2 for i in ids]), seq, lower)
    here = find(tier, list(range(200)))
    assert not here.keys() & lower.rows.keys()
    assert len(here) == (ROOM if tier.exclusive else 100)
    want = {i: (i // 50 + 1, bool(i % 2)) for i in range(200)}
    if tier.exclusive:
        assert {**here, **lower.rows} == want
    else:
        assert not lower.rows
        assert here == {i: (value, False) for i, (value, dirty) in want.items() if dirty}


def test_an_exclusive_tier_is_as_before_when_the_one_below_refuses(tier: Tier) -> None:
    tier.put(moving(tier, range(ROOM), 1, dirty=[i % 2 for i in range(ROOM)]), 0, nothing_leaves)
    before = find(tier, list(range(100)))
    if tier.exclusive:
        for ids in ([50], range(50, 90)):
            with pytest.raises(StoreIOError):
                tier.put(moving(tier, ids, 2), 1, refuse)
            assert find(tier, list(range(100))) == before
        found = tier.find(make_keys(0, np.arange(5)))
        tier.take(found)
        tier.put(
            moving(tier, range(5), 1, dirty=[0, 1, 0, 1, 0]), 1, nothing_leaves
        )  # the room that they left
    assert find(tier, list(range(100))) == before


def test_flush_writes_dirty_rows_once_and_they_stay(tier: Tier) -> None:
    tier.put(moving(tier, [1, 2, 3], 7, dirty=[1, 0, 1]), 0, nothing_leaves)
    written: list[int] = []

    def write(keys: Any, rows: Any) -> None:
        written.extend(keys.tolist())
        assert [row[0] for row in told(keys, rows, tier.leaving)] == keys.tolist()

    values = {i: value for i, (value, _) in find(tier, [1, 2, 3]).items()}
    if tier.exclusive:
        assert sorted(int(key) for keys in tier.keys(only_dirty=True) for key in keys) == [1, 3]
        with pytest.raises(StoreIOError):
            tier.flush(refuse)
    tier.flush(write)
    assert sorted(written) == ([1, 3] if tier.exclusive else [])
    assert not list(tier.keys(only_dirty=True))
    tier.flush(nothing_leaves)
    assert {i: value for i, (value, _) in find(tier, [1, 2, 3]).items()} == values
    assert not any(dirty for _, dirty in find(tier, [1, 2, 3]).values())


def test_sizes_and_ends(tier: Tier) -> None:
    tier.put(moving(tier, range(10), 1), 0, nothing_leaves)
    sizes = tier.stats()
    assert sizes.memory_bytes >= (10 * row_bytes(tier.codec) if tier.exclusive else 0)
    assert sizes.buffer_bytes >= 0
    assert len(sizes.tables) in (0, 2)
    assert tier.policy_seconds >= 0
    keys = make_keys(0, np.array([1, 50]))
    assert set(tier.announce(keys, 5, 0)) <= set(keys)
    tier.begin_lookup(5)
    tier.wait(5)
    tier.end_lookup(5, keys)
    tier.announce(keys, NEVER, 5)
    tier.close()
    tier.close()


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls(tier: Tier, seed: int) -> None:
    """Against a dictionary: of each row the newest version is here or was demoted, in one place."""
    rng = random.Random(seed)
    here: dict[int, tuple[int, bool]] = {}
    for seq in range(60):
        ids = rng.sample(range(60), rng.randint(1, 30))
        outside = [i for i in ids if i not in here or not tier.exclusive]
        act = rng.choice(["put", "put", "take", "flush", "refused"])
        if act == "take":
            tier.take(tier.find(make_keys(0, np.array(ids))))
            here = {i: row for i, row in here.items() if i not in ids or not tier.exclusive}
        elif act == "flush":
            tier.flush(lambda keys, rows: None)
            here = {i: (value, False) for i, (value, _) in here.items()}
        elif outside:
            dirty = [1 if not tier.exclusive else rng.randint(0, 1) for _ in outside]
            lower = Lower(refuses=act == "refused")
            try:
                tier.put(moving(tier, outside, seq + 1, dirty), seq, lower)
            except StoreIOError:
                continue
            flags = [bool(flag) and tier.exclusive for flag in dirty]
            here.update((i, (seq + 1, flag)) for i, flag in zip(outside, flags, strict=True))
            here = {i: row for i, row in here.items() if i not in lower.rows}
        assert find(tier, list(range(60))) == here
        assert held(tier) == sorted(here)


# -- lists of tiers ------------------------------------------------------------------------------

ADAM = optim.Adam(lr=0.1)


def slots(count: int) -> int:
    return budget(count, ADAM)


LISTS = {
    "one": (TierConfig(hbm=slots(5000), ssd=0), []),
    "two": (TierConfig(hbm=slots(40), engine="memory"), []),
    "two, remote": (TierConfig(hbm=slots(40), ssd=0), [10_000]),
    "three": (TierConfig(hbm=slots(40), uvm=slots(30), engine="memory"), []),
    "four": (TierConfig(hbm=slots(40), uvm=slots(30), engine="memory"), [50]),
    "four, tiny": (TierConfig(hbm=slots(16), uvm=slots(16), engine="memory"), [8]),
    "five": (TierConfig(hbm=slots(40), uvm=slots(30), engine="memory"), [100, 200]),
}


def steps(module: Bags, batches: list[Any], ahead: bool) -> list[torch.Tensor]:
    if not ahead:
        return train(module, batches)
    loader = prefetch(batches, module, depth=2, window=5, inputs={"": lambda batch: (batch,)})
    return [out for ids in loader for out in train(module, [ids])]


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
@pytest.mark.parametrize("tiers", LISTS)
def test_any_list_of_tiers_trains_as_memory_does(
    tiers: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, remote = LISTS[tiers]
    batches = random_batches(4, 30, 1, 6, 3)
    expected = build(TierConfig(hbm="all"), ADAM, (5,))
    reference = train(expected, batches)
    register(monkeypatch, *remote)
    with build(config, ADAM, (5,)) as module:
        (group,) = module.engine.groups
        assert len(group.stack.tiers) == 1 + bool(config.uvm) + len(remote) + bool(config.ssd)
        for got, want in zip(steps(module, batches, ahead), reference, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(everything(module), everything(expected), strict=True):
            assert torch.equal(got, want)
        stats = module.stats()
        for number in range(len(remote)):
            assert stats["tiers"][f"remote{number}"]["row_hits"] > 0
            assert stats["memory"][f"remote{number}"] > 0
            assert stats["tables"]["t0"]["tiers"][f"remote{number}"]["rows"] > 0
        rows, hits = stats["tiers"]["hbm"]["rows"], sum(t["row_hits"] for t in stats["tiers"].values())
        assert hits + stats["initialised_rows"] + stats["overflow_rows"] >= rows >= hits
        touched = torch.cat(list(module.touched_ids()))
        assert len(touched) == len(set(touched.tolist()))
        module.flush()
        assert all(torch.equal(a, b) for a, b in zip(everything(module), everything(expected), strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
@pytest.mark.parametrize("remote", [[50], [20, 40]], ids=["four", "five"])
def test_commits_have_the_rows_of_every_tier(
    remote: list[int], ahead: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, *remote)
    batches = random_batches(7, 30, 1, 6, 3)
    expected = build(TierConfig(hbm="all"), ADAM, (5,))
    config = TierConfig(hbm=slots(40), uvm=slots(30), ssd="64MiB", path=tmp_path / "rows")
    for part in (batches[:15], batches[15:]):
        train(expected, part[:10])
        with build(config, ADAM, (5,)) as module:
            steps(module, part[:10], ahead)
            commit = module.commit({"step": 10})
            committed = everything(expected)
            steps(module, part[10:], ahead)
            module.engine.go_to(commit)
            assert all(torch.equal(a, b) for a, b in zip(everything(module), committed, strict=True))
            module.close(commit=False)


def test_a_full_list_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, 20)
    with build(TierConfig(hbm=slots(20), ssd=0), SGD, (5,)) as module:
        with pytest.raises(TierFullError, match="or set ssd"):
            train(module, random_batches(0, 60, 1, 5, 3))
        before = everything(module)
        module([next(iter(module.touched_ids()))[:1].view(1, 1)])
        assert all(torch.equal(a, b) for a, b in zip(before, everything(module), strict=True))


def test_a_tier_below_the_store_gives_what_the_store_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = random_batches(6, 20, 1, 6, 3)
    first = build(TierConfig(hbm="all"), SGD, (5,))
    train(first, batches[:10])
    (group,) = first.engine.groups
    keys = np.concatenate(list(group.fast.keys()))
    rows = np.empty((len(keys), group.layout.row_bytes), np.uint8)
    group.read(keys, rows)
    source = RemoteSource({})
    source.write(keys, rows)
    monkeypatch.setattr(registry, "TIERS", [*registry.TIERS, lambda _: source])
    config = TierConfig(hbm=slots(40), engine="memory")
    with build(config, SGD, (5,)) as module:
        assert all(torch.equal(a, b) for a, b in zip(everything(module), everything(first), strict=True))
        assert set(torch.cat(list(module.touched_ids())).tolist()) == set((keys % ROWS).tolist())
        for got, want in zip(train(module, batches[10:]), train(first, batches[10:]), strict=True):
            assert torch.equal(got, want)
        touched = torch.cat(list(module.touched_ids())).tolist()
        assert len(touched) == len(set(touched))
        assert module.stats()["tiers"]["source"]["row_hits"] > 0


def test_exclusive_tiers_come_before_lasting_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TIERS", [*registry.TIERS, lambda _: RemoteTier(5)])
    with pytest.raises(ValueError, match="an exclusive tier is below a lasting one"):
        build(TierConfig(hbm=slots(40), engine="memory"), SGD, (5,))
