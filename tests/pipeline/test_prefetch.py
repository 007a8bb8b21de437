"""Prefetch changes when rows move, never what is computed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tests.bags import SGD, Bags, budget, build, everything, random_batches
from tests.pipeline.conftest import BESIDE, BY_WORKER
from tierstore import TierConfig, optim
from tierstore.errors import ConfigError, InputError, TierFullError
from tierstore.pipeline import made
from tierstore.pipeline.prefetch import prefetch
from tierstore.pipeline.prefetch_pipeline import PrefetchPipeline

INPUTS = {"": lambda batch: (batch,)}


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() * torch.arange(out.numel()).view_as(out).cos()).sum()


def run(module: Bags, batches: Any, **options: Any) -> list[torch.Tensor]:
    outputs = []
    for ids in prefetch(batches, module, inputs=INPUTS, **options):
        out = module(ids)
        loss_of(out).backward()
        outputs.append(out.detach().clone())
    return outputs


def reference(
    batches: list[Any], optimizer: optim.OptimizerSpec, dims: tuple[int, ...]
) -> list[torch.Tensor]:
    module = build(TierConfig(hbm="all"), optimizer, dims)
    outputs = []
    for ids in batches:
        out = module(ids)
        loss_of(out).backward()
        outputs.append(out.detach().clone())
    return outputs + everything(module)


def config_for(policy: str) -> TierConfig:
    return TierConfig(hbm=budget(90, policy=policy), engine="memory", policy=policy)


def workers() -> int:
    return sum(thread.name == "tierstore-prefetch" for thread in threading.enumerate())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    dims=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=2),
    slots=st.integers(16, 200),
    uvm=st.sampled_from([0, 40]),
    policy=st.sampled_from(["lru", "lfu", "lookahead"]),
    depth=st.one_of(st.integers(0, 8), st.just("auto")),
    window=st.one_of(st.integers(0, 12), st.just("auto")),
    optimizer=st.sampled_from([SGD, optim.RowWiseAdagrad(lr=0.1), optim.Adagrad(lr=0.1), optim.Adam(lr=0.1)]),
    threads=st.sampled_from([BESIDE, BY_WORKER]),
)
def test_equals_memory(
    seed: int,
    dims: list[int],
    slots: int,
    uvm: int,
    policy: str,
    depth: Any,
    window: Any,
    optimizer: optim.OptimizerSpec,
    threads: int,
) -> None:
    made.MANY_THREADS = threads
    batches = random_batches(seed, 14, len(dims), 6, 3)
    want = reference(batches, optimizer, tuple(dims))
    size = len(dims) * budget(slots, optimizer, 8, policy)
    below = len(dims) * budget(uvm, optimizer, 8, policy) if uvm else 0
    config = TierConfig(hbm=size, uvm=below, engine="memory", policy=policy)
    with build(config, optimizer, tuple(dims)) as module:
        got = run(module, batches, depth=depth, window=window) + everything(module)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert workers() == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "lookahead"])
def test_hit_rates_do_not_depend_on_timing(policy: str) -> None:
    batches = random_batches(5, 40, 1, 10, 3)
    seen = set()
    for pause in (0.0, 0.002):
        with build(
            TierConfig(hbm=budget(90, policy=policy), engine="memory", policy=policy), SGD, (5,)
        ) as module:
            for ids in prefetch(batches, module, depth=2, window=6, inputs=INPUTS):
                out = module(ids)
                threading.Event().wait(pause)
                loss_of(out).backward()
            stats = module.stats()
            seen.add((stats["tiers"]["hbm"]["row_hits"], stats["evicted_rows"], stats["overflow_rows"]))
    assert len(seen) == 1


def test_lookahead_beats_lru() -> None:
    batches = random_batches(6, 60, 1, 10, 3)
    misses = {}
    for policy in ("lru", "lookahead"):
        with build(
            TierConfig(hbm=budget(90, policy=policy), engine="memory", policy=policy), SGD, (5,)
        ) as module:
            run(module, batches, depth=1, window=20)
            misses[policy] = module.stats()["tiers"]["ssd"]["row_hits"]
    assert misses["lookahead"] < 0.9 * misses["lru"]


def test_leaving_early_and_going_on() -> None:
    batches = random_batches(7, 20, 1, 8, 3)
    want = reference(batches[:5] + batches, SGD, (5,))
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        got = []
        for index, ids in enumerate(prefetch(batches, module, depth=3, window=5, inputs=INPUTS)):
            if index == 5:
                break  # this batch is not trained on
            out = module(ids)
            loss_of(out).backward()
            got.append(out.detach().clone())
        gc.collect()
        assert workers() == 0
        got += run(module, batches, depth=2) + everything(module)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_exception_in_the_loop_ends_the_worker() -> None:
    batches = random_batches(7, 20, 1, 8, 3)
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:

        def broken() -> None:
            for index, ids in enumerate(prefetch(batches, module, inputs=INPUTS)):
                loss_of(module(ids)).backward()
                if index == 3:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            broken()
        gc.collect()
        assert workers() == 0
        assert len(run(module, batches)) == 20


def test_an_exception_in_the_loader_reaches_the_loop() -> None:
    def loader() -> Iterator[Any]:
        yield from random_batches(7, 10, 1, 8, 3)
        raise OSError("the loader's own error")

    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        with pytest.raises(OSError, match="the loader's own error"):
            run(module, loader(), depth=1, window=1)
        assert workers() == 0


def test_validation_and_skipped_batches_in_between() -> None:
    batches = random_batches(8, 16, 1, 8, 3)
    trained = [b for i, b in enumerate(batches) if i % 5 != 4]
    want = reference(trained, SGD, (5,))
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        got = []
        for index, ids in enumerate(prefetch(batches, module, depth=2, window=4, inputs=INPUTS)):
            if index % 5 == 4:
                module.eval()
                for other in prefetch(batches[:3], module, inputs=INPUTS):
                    assert not module(other).requires_grad
                module(ids)
                module.train()
                continue
            out = module(ids)
            loss_of(out).backward()
            got.append(out.detach().clone())
        got += everything(module)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("slots", [20, 60])
def test_gradient_accumulation_over_several_batches(slots: int) -> None:
    """Graphs of several batches are alive at once, more than the depth: nothing may wait for them forever."""
    batches = random_batches(9, 16, 1, 8, 3)

    def joint(module: Bags, source: Any) -> list[torch.Tensor]:
        held = []
        for ids in source:
            held.append(loss_of(module(ids)))
            if len(held) == 4:
                torch.stack(held).sum().backward()
                held.clear()
        return everything(module)

    want = joint(build(TierConfig(hbm="all"), SGD, (5,)), batches)
    with build(TierConfig(hbm=budget(slots), engine="memory"), SGD, (5,)) as module:
        got = joint(module, prefetch(batches, module, depth=1, window=3, inputs=INPUTS))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_batches_without_a_forward_call_do_not_stop_the_worker() -> None:
    batches = random_batches(10, 12, 1, 8, 3)
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        kept = []
        for index, ids in enumerate(prefetch(batches, module, depth=1, window=0, inputs=INPUTS)):
            if index in (0, 3):
                kept.append(module(ids))  # alive, never used for a backward pass
        assert index == 11
        del kept
        gc.collect()
        assert len(run(module, batches)) == 12


def test_batches_may_pass_faster_than_they_are_planned() -> None:
    batches = random_batches(10, 30, 1, 8, 3)
    want = reference(batches[20:], SGD, (5,))
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        got = []
        for index, ids in enumerate(prefetch(batches, module, depth=2, window=3, inputs=INPUTS)):
            if index >= 20:
                out = module(ids)
                loss_of(out).backward()
                got.append(out.detach().clone())
        got += everything(module)
        assert module.stats()["lookups"] == 30
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_two_models_on_one_loader() -> None:
    batches = random_batches(11, 10, 1, 8, 3)
    want = reference(batches, SGD, (5,))
    config = TierConfig(hbm=budget(60), engine="memory")
    with build(config, SGD, (5,)) as a, build(config, SGD, (5,)) as b:
        both = torch.nn.ModuleDict({"a": a, "b": b})
        got: list[list[torch.Tensor]] = [[], []]
        for ids in prefetch(batches, [a, b], inputs={a: lambda x: (x,), b: lambda x: (x,)}):
            for outs, module in zip(got, (a, b), strict=True):
                out = module(ids)
                loss_of(out).backward()
                outs.append(out.detach().clone())
        for ids in prefetch(prefetch(batches, both["a"], inputs=INPUTS), both["b"], inputs=INPUTS):
            assert torch.equal(a(ids), b(ids))
        for outs in got:
            assert all(torch.equal(x, y) for x, y in zip(outs, want, strict=False))


def test_bad_ids_surface_in_the_forward_call_of_their_batch() -> None:
    batches = random_batches(12, 8, 1, 8, 3)
    batches[5] = [torch.full((8, 3), -7)]
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        done = 0
        source = prefetch(batches, module, depth=2, inputs=INPUTS)
        for ids in source:
            if done == 5:
                with pytest.raises(InputError, match="id -7"):
                    module(ids)
                break
            loss_of(module(ids)).backward()
            done += 1
        assert done == 5


def test_a_full_tier_surfaces_once_and_leaves_the_module_usable() -> None:
    batches = random_batches(13, 30, 1, 8, 3)
    with build(TierConfig(hbm=budget(60), ssd=0), SGD, (5,)) as module:
        with pytest.raises(TierFullError):
            run(module, batches, depth=2, window=3)
        gc.collect()
        assert workers() == 0
        module.eval()
        assert module(batches[0]).shape == (8, 5)


def test_pipeline_in_torchrecs_form() -> None:
    class Model(torch.nn.Module):
        def __init__(self, bags: Bags) -> None:
            super().__init__()
            self.bags = bags
            self.scale = torch.nn.Parameter(torch.ones(5))

        def forward(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.bags(ids) * self.scale
            return loss_of(out), out.detach()

    batches = random_batches(14, 10, 1, 8, 3)

    def steps(config: TierConfig) -> list[torch.Tensor]:
        with build(config, SGD, (5,)) as bags:
            model = Model(bags)
            pipeline = PrefetchPipeline(
                model, torch.optim.SGD([model.scale], lr=0.1), "cpu", inputs={"bags": lambda batch: (batch,)}
            )
            source = iter(batches)
            outs = [pipeline.progress(source) for _ in range(10)]
            with pytest.raises(StopIteration):
                pipeline.progress(source)
            return [*outs, *everything(bags), model.scale.detach()]

    got, want = steps(TierConfig(hbm=budget(60), engine="memory")), steps(TierConfig(hbm="all"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="no tiered module"):
        prefetch([], torch.nn.Linear(1, 1))
    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        for depth in (-1, 65, 1.5, "deep"):
            with pytest.raises(ConfigError, match="depth is"):
                prefetch([], module, depth=depth)
        with pytest.raises(ConfigError, match="'nothing' is not a tiered module"):
            prefetch([], module, inputs={"nothing": lambda batch: batch})
        assert list(prefetch([], module)) == []
    assert tierstore.__version__


def test_every_batch_before_an_exception_in_the_loader_is_trained_on() -> None:
    def loader() -> Iterator[Any]:
        yield from random_batches(7, 10, 1, 8, 3)
        raise OSError("the loader's own error")

    with build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5,)) as module:
        coming = prefetch(loader(), module, inputs=INPUTS)
        for _ in range(10):
            loss_of(module(next(coming))).backward()
        with pytest.raises(OSError, match="the loader's own error"):
            next(coming)
        assert workers() == 0


def test_that_a_module_cannot_be_prefetched_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    batches = [[torch.arange(n)] for n in range(1, 5)]
    config = TierConfig(engine="memory")
    with tierstore.TieredEmbedding(20, 3, config=config, optimizer=optim.SGD(lr=0.1)) as module:
        for _ in range(3):
            for (ids,) in prefetch(batches, module):
                module(ids + 1).sum().backward()
    assert sum("cannot be told from the batch" in record.message for record in caplog.records) == 1


def test_a_loader_may_be_a_sequence_without_iter() -> None:
    class Indexed:
        def __getitem__(self, index: int) -> torch.Tensor:
            return [torch.arange(n) for n in range(1, 5)][index]

    with tierstore.TieredEmbedding(20, 3, config=TierConfig(engine="memory")) as module:
        assert sum(module(ids).shape[0] for ids in prefetch(Indexed(), module)) == 10  # type: ignore[arg-type]
