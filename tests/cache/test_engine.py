"""The engine against the same kernels with every row in memory: equal outputs and rows, bit for bit."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bags import ROWS, SGD, budget, build, everything, random_batches, train
from tierstore import TierConfig, optim
from tierstore.cache.stats import counters_of, go_on_counting
from tierstore.errors import ClosedError, ConfigError, InputError, TierFullError

TIERS: dict[str, dict[str, int]] = {  # slots; 0: no such tier
    "hbm": {"hbm": 5000, "uvm": 0, "ssd": 0},
    "hbm+ssd": {"hbm": 100, "uvm": 0, "ssd": 1},
    "hbm+uvm+ssd": {"hbm": 100, "uvm": 60, "ssd": 1},
    "hbm+uvm": {"hbm": 100, "uvm": 5000, "ssd": 0},
    "overflow": {"hbm": 20, "uvm": 0, "ssd": 1},
}


@pytest.mark.parametrize("policy", ["lru", "lfu", "lookahead"])
@pytest.mark.parametrize("group", TIERS)
@pytest.mark.parametrize("optimizer", [optim.SGD(lr=0.1), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.1)])
def test_tiers_equal_memory(group: str, policy: str, optimizer: optim.OptimizerSpec) -> None:
    batches = random_batches(0, 25, 2, 8, 3)
    expected = build(TierConfig(hbm="all"), optimizer, (5, 5))
    reference = train(expected, batches)
    slots = TIERS[group]
    config = TierConfig(
        hbm=budget(slots["hbm"], optimizer, 5, policy),
        uvm=budget(slots["uvm"], optimizer, 5, policy) if slots["uvm"] else 0,
        ssd="1GiB" if slots["ssd"] else 0,
        policy=policy,
        engine="memory",
    )
    with build(config, optimizer, (5, 5)) as module:
        for got, want in zip(train(module, batches), reference, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(everything(module), everything(expected), strict=True):
            assert torch.equal(got, want)
        stats = module.stats()
        if group not in ("hbm", "hbm+uvm"):
            assert stats["evicted_rows"] > 0
            assert stats["tiers"]["ssd"]["row_hits"] > 0
        if group == "overflow":
            assert stats["overflow_rows"] > 0


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    dims=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=3),
    hbm=st.integers(8_000, 40_000),
    uvm=st.sampled_from([0, 20_000]),
    policy=st.sampled_from(["lru", "lfu", "lookahead"]),
    joint=st.integers(1, 4),
)
def test_backward_may_come_later(
    seed: int, dims: list[int], hbm: int, uvm: int, policy: str, joint: int
) -> None:
    """Several forwards before one backward: their rows stay pinned, whatever the budget."""
    optimizer = optim.Adagrad(lr=0.1)

    def run(config: TierConfig) -> list[torch.Tensor]:
        with build(config, optimizer, tuple(dims)) as module:
            for begin in range(0, 8, joint):
                outs = [module(ids) for ids in random_batches(seed + begin, joint, len(dims), 6, 2)]
                if begin == 4:
                    outs.pop()  # a graph dropped without a backward pass
                sum((out.cos().sum() for out in outs), torch.zeros(())).backward() if outs else None
            return everything(module)

    want = run(TierConfig(hbm="all"))
    got = run(TierConfig(hbm=hbm, uvm=uvm, engine="memory", policy=policy))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_reading_changes_nothing() -> None:
    batches = random_batches(1, 6, 1, 8, 3)
    with build(TierConfig(hbm=budget(40), engine="memory"), optim.SGD(lr=0.1), (8,)) as module:
        train(module, batches[:3])
        touched = torch.cat(list(module.touched_ids()))
        module.reset_stats()
        module.eval()
        outputs = [module(ids) for ids in batches]
        assert not any(out.requires_grad for out in outputs)
        assert sorted(torch.cat(list(module.touched_ids())).tolist()) == sorted(touched.tolist())
        stats = module.stats()
        assert stats["evicted_rows"] == stats["written_rows"] == stats["lookups"] == 0
        for ids, out in zip(batches, outputs, strict=True):
            assert torch.allclose(out, module.rows(ids[0].flatten()).view(8, 3, 8).sum(1))


def test_rows_that_a_plan_has_chosen_to_leave_are_listed_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a prefetch, whose thread plans while the training thread resets the rows."""
    config = TierConfig(hbm=budget(20), engine="memory", policy="lru")
    with build(config, optim.SGD(lr=0.1), (5,)) as module:
        (group,) = module.engine.groups
        ids = torch.arange(20).view(-1, 1)
        initial = module.rows(ids.flatten())
        module([ids]).sum().backward()
        chosen, go, wait = threading.Event(), threading.Event(), group.stack.wait

        def held(seq: int) -> None:
            chosen.set()
            go.wait(60)
            wait(seq)

        monkeypatch.setattr(group.stack, "wait", held)
        plan = threading.Thread(target=lambda: module([torch.arange(30, 45).view(-1, 1)]))
        plan.start()
        assert chosen.wait(60)
        threading.Timer(0.2, go.set).start()
        touched = torch.cat(list(module.touched_ids()))
        plan.join()
        assert set(ids.flatten().tolist()) <= set(touched.tolist())
        module.reset_parameters()
        assert torch.equal(module.rows(ids.flatten()), initial)


def test_counting_goes_on_in_another_process() -> None:
    batches = random_batches(1, 24, 1, 8, 3)
    counted = []
    for pause in (False, True):
        with build(TierConfig(hbm=budget(40), engine="memory"), optim.SGD(lr=0.1), (8,)) as module:
            train(module, batches[:12])
            if pause:
                saved = json.loads(json.dumps(counters_of(module.engine.groups)))
                module.reset_stats()
                go_on_counting(module.engine.groups, saved)
            train(module, batches[12:])
            stats = module.stats()
        counted.append({name: value for name, value in stats.items() if name.endswith(("_rows", "lookups"))})
        counted[-1]["tiers"] = stats["tiers"]
    assert counted[0] == counted[1]
    assert counted[0]["written_rows"] > 0


def test_commit_close_reopen(tmp_path) -> None:
    optimizer = optim.Adam(lr=0.05)
    batches = random_batches(2, 10, 2, 8, 3)
    whole = build(TierConfig(hbm="all"), optimizer, (4, 6))
    reference = train(whole, batches)
    for engine in ("rocksdb", "lmdb"):
        config = TierConfig(hbm=budget(60, optimizer, 6) * 2, path=tmp_path / engine, engine=engine)
        with build(config, optimizer, (4, 6)) as module:
            got = train(module, batches[:5])
            module.commit({"step": 5})
        with build(config, optimizer, (4, 6)) as module:
            assert module.engine.committed_extra() in ({"step": 5}, {})
            got += train(module, batches[5:])
            assert all(torch.equal(a, b) for a, b in zip(got, reference, strict=True))
            for a, b in zip(everything(module), everything(whole), strict=True):
                assert torch.equal(a, b)


def test_the_commit_that_the_tables_are_at_has_its_count_of_updates(tmp_path) -> None:
    """An update of no row leaves the tables as they were opened, and counts."""
    config = TierConfig(hbm="64KiB", ssd="1GiB", path=tmp_path)
    with build(config, optim.Adam(lr=0.1), (5,)) as module:
        train(module, random_batches(0, 3, 1, 8, 3))
    module = build(config, optim.Adam(lr=0.1), (5,))
    newest = module.engine.commits()[-1].id
    train(module, [[torch.empty(2, 0, dtype=torch.int64)]])
    assert list(module.engine.updates.values()) == [4]
    module.engine.go_to(newest)
    assert list(module.engine.updates.values()) == [3]
    module.close()


def test_a_commit_that_is_not_kept_closes_nothing(tmp_path) -> None:
    config = TierConfig(hbm="64KiB", ssd="1GiB", path=tmp_path)
    with build(config, SGD, (5,)) as module:
        first = module.engine.commit()
        for _ in range(8):
            train(module, random_batches(0, 1, 1, 8, 3))
            module.engine.commit()
        rows = everything(module)
        with pytest.raises(InputError, match=f"commit {first} is not kept; kept commits: "):
            module.engine.go_to(first)
        assert all(torch.equal(now, before) for now, before in zip(everything(module), rows, strict=True))


def test_load_rows_round_trip() -> None:
    with build(TierConfig(hbm=budget(40), engine="memory"), optim.Adagrad(lr=0.1), (3,)) as module:
        ids = torch.randperm(ROWS)
        weight, state = torch.randn(ROWS, 3), {"sum": torch.rand(ROWS, 3)}
        module.load_rows(ids, weight, state)
        assert torch.equal(module.rows(ids), weight)
        assert torch.equal(module.optimizer_rows(ids)["sum"], state["sum"])
        with pytest.raises(InputError, match="repeat"):
            module.load_rows(torch.tensor([1, 1]), torch.zeros(2, 3))
        with pytest.raises(InputError, match=r"weight has shape \(1, 2\)"):
            module.load_rows(torch.tensor([1]), torch.zeros(1, 2))


def test_bad_ids_change_nothing() -> None:
    with build(TierConfig(hbm=budget(40), engine="memory"), optim.SGD(lr=0.1), (3,)) as module:
        for bad in (-1, ROWS):
            ids = torch.tensor([[0, 5], [bad, 7]])
            with pytest.raises(
                InputError, match=rf"f0: id {bad} at position 2 is out of range \[0, {ROWS}\)"
            ):
                module([ids])
        assert list(module.touched_ids()) == []


def test_memory_only_tier_says_when_it_is_full() -> None:
    optimizer = optim.SGD(lr=0.1)
    with build(TierConfig(hbm=budget(60, optimizer, 64), ssd=0), optimizer, (64,)) as module:
        with pytest.raises(TierFullError, match="or set ssd"):
            train(module, random_batches(0, 50, 1, 5, 3))
        before = everything(module)
        known = next(iter(module.touched_ids()))
        module([known[:1].view(1, 1)])  # rows that are there can be used on
        assert all(torch.equal(a, b) for a, b in zip(before, everything(module), strict=True))


def test_offline_policies_are_for_simulations() -> None:
    with pytest.raises(ConfigError, match="for simulations only"):
        build(TierConfig(hbm=budget(40), engine="memory", policy="belady"), optim.SGD(lr=0.1), (3,))


def test_budget_below_the_minimum_and_use_after_close() -> None:
    with pytest.raises(ConfigError, match=r"below the minimum .* raise it to at least \d+ bytes"):
        build(TierConfig(hbm=100, engine="memory"), optim.SGD(lr=0.1), (3,))
    module = build(TierConfig(hbm=budget(40), engine="memory"), optim.SGD(lr=0.1), (3,))
    module.close()
    module.close()
    with pytest.raises(ClosedError):
        module(random_batches(0, 1, 1, 2, 2)[0])
    with pytest.raises(ClosedError):
        module.rows(torch.tensor([1]))
