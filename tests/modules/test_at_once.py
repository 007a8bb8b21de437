"""Lookups that one native call makes train as lookups that are made step by step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    InputError,
    KeyedJaggedTensor,
    PoolingType,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    optim,
)

ROWS, DIM = 50, 6
OPTIONS: dict[str, Any] = {"config": TierConfig(hbm="all"), "optimizer": optim.Adagrad(lr=0.1)}


def bag(**options: Any) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(ROWS, DIM, **{"mode": "sum", **OPTIONS, **options})


def collection(dims: tuple[int, ...] = (DIM, DIM), **options: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(ROWS, dim, f"t{number}", feature_names=[f"f{number}"], pooling=pooling)
        for number, (dim, pooling) in enumerate(zip(dims, (PoolingType.SUM, PoolingType.MEAN), strict=True))
    ]
    return EmbeddingBagCollection(tables, **{**OPTIONS, **options})


def embedding(**options: Any) -> TieredEmbedding:
    return TieredEmbedding(ROWS, DIM, **{**OPTIONS, **options})


def sequences(dims: tuple[int, ...] = (DIM, DIM), **options: Any) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(ROWS, dim, f"t{number}", feature_names=[f"f{number}"])
        for number, dim in enumerate(dims)
    ]
    return EmbeddingCollection(tables, **{**OPTIONS, **options})


def ids(count: int, seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def keyed(seed: int, keys: tuple[str, ...] = ("f0", "f1"), dtype: torch.dtype = torch.int64) -> Any:
    lengths = torch.randint(0, 4, (3 * len(keys),), generator=torch.Generator().manual_seed(seed + 100))
    return KeyedJaggedTensor(list(keys), ids(int(lengths.sum()), seed, dtype), lengths=lengths.to(dtype))


def with_offsets(seed: int) -> Any:
    batch = keyed(seed)
    return KeyedJaggedTensor(batch.keys(), batch.values(), offsets=batch.offsets())


def not_contiguous(seed: int) -> Any:
    batch = keyed(seed)
    wide = torch.stack([batch.values(), batch.values() * 0], dim=1)[:, 0]
    lengths = torch.stack([batch.lengths(), batch.lengths() * 0], dim=1)[:, 0]
    return KeyedJaggedTensor(batch.keys(), wide, lengths=lengths)


def values(out: Any) -> Tensor:
    if isinstance(out, dict):
        return torch.cat([one.values().flatten() for one in out.values()])
    found: Tensor = out if isinstance(out, Tensor) else out.values()
    return found


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]
I32 = torch.int32
CASES: dict[str, Case] = {
    "offsets": (bag, lambda seed: (ids(9, seed), torch.tensor([0, 2, 2, 7]))),
    "mean": (lambda: bag(mode="mean"), lambda seed: (ids(9, seed), torch.tensor([0, 4]))),
    "int32": (bag, lambda seed: (ids(9, seed, I32), torch.tensor([0, 2, 2, 7], dtype=I32))),
    "a last offset": (
        lambda: bag(include_last_offset=True),
        lambda seed: (ids(9, seed), torch.tensor([0, 2, 9])),
    ),
    "rows of ids": (bag, lambda seed: (ids(12, seed).view(4, 3),)),
    "one id each": (bag, lambda seed: (ids(12, seed).view(12, 1),)),
    "padding": (lambda: bag(padding_idx=3), lambda seed: (ids(40, seed).view(4, 10),)),
    "many ids": (bag, lambda seed: (ids(70_000, seed).view(700, 100),)),
    "bags that lie apart": (bag, lambda seed: (ids(48, seed).view(8, 6)[::2, ::2],)),
    "offsets that lie apart": (bag, lambda seed: (ids(18, seed)[::2], torch.tensor([0, 8, 2, 8, 7])[::2])),
    "rows that lie apart": (embedding, lambda seed: (ids(18, seed)[::2],)),
    "no ids": (bag, lambda seed: (ids(0, seed), torch.tensor([0, 0]))),
    "no bags": (bag, lambda seed: (ids(0, seed), torch.tensor([], dtype=torch.int64))),
    "fp16": (lambda: bag(dtype=torch.float16), lambda seed: (ids(12, seed).view(4, 3),)),
    "wrong ids that are left out": (
        lambda: bag(config=TierConfig(hbm="all", bounds_check="ignore")),
        lambda seed: ((ids(12, seed) * 2 - 20).view(4, 3),),
    ),
    "keys": (collection, lambda seed: (keyed(seed),)),
    "keys of int32": (collection, lambda seed: (keyed(seed, dtype=I32),)),
    "keys with offsets": (collection, lambda seed: (with_offsets(seed),)),
    "rows": (embedding, lambda seed: (ids(9, seed),)),
    "rows of a matrix of int32": (embedding, lambda seed: (ids(12, seed, I32).view(3, 4),)),
    "rows with padding": (lambda: embedding(padding_idx=3), lambda seed: (ids(60, seed),)),
    "rows of no ids": (embedding, lambda seed: (ids(0, seed),)),
    "rows of fp16": (lambda: embedding(dtype=torch.float16), lambda seed: (ids(9, seed),)),
    "sequences": (sequences, lambda seed: (keyed(seed),)),
    "sequences with offsets": (sequences, lambda seed: (with_offsets(seed),)),
    "sequences in another order": (sequences, lambda seed: (keyed(seed, ("f1", "f0")),)),
    "sequences with ids": (lambda: sequences(need_indices=True), lambda seed: (keyed(seed),)),
    "sequences that lie apart": (sequences, lambda seed: (not_contiguous(seed),)),
    "keys that lie apart": (collection, lambda seed: (not_contiguous(seed),)),
    "keys in another order": (collection, lambda seed: (keyed(seed, ("f1", "other", "f0")),)),
}


def made_at_once(out: Any) -> bool:
    node = values(out).grad_fn
    names = []
    while node is not None:  # views and conversions come after it
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    return any("AtOnceFunctionBackward" in name for name in names)


def without_seconds(stats: Any) -> Any:
    if not isinstance(stats, dict):
        return stats
    kept = {name: value for name, value in stats.items() if not str(name).endswith("_seconds")}
    return {name: without_seconds(value) for name, value in kept.items() if name != "memory"}


def step_by_step(module: Any) -> Any:
    for group in module.engine.groups:
        group.resident.forward = None
    return module


@pytest.mark.parametrize("name", CASES)
def test_outputs_rows_and_counters_are_those_of_lookups_step_by_step(name: str) -> None:
    build, arguments = CASES[name]
    module: Any = build()
    oracle: Any = step_by_step(build())
    at_once = []
    for seed in (0, 1, 0, 1, 2, 0):
        outputs = [values(one(*arguments(seed))) for one in (module, oracle)]
        assert torch.equal(*outputs)
        at_once.append(made_at_once(outputs[0]))
        assert not made_at_once(outputs[1])
        for out in outputs:
            weights = torch.arange(out.numel()).view_as(out) * 0.25 - 1
            (out.float() * weights).sum().backward()
    assert at_once[2:4] == [True, True]  # their rows are here
    assert at_once[-1]
    for table in module.table_names() if hasattr(module, "configs") else [None]:
        assert torch.equal(module.rows(torch.arange(ROWS), table), oracle.rows(torch.arange(ROWS), table))
    stats, expected = module.stats(), oracle.stats()
    assert without_seconds(stats) == without_seconds(expected)
    assert stats["announce_seconds"] > 0
    assert stats["plan_seconds"] > 0
    assert stats["compute_seconds"] > 0


@pytest.mark.parametrize("name", ["offsets", "rows of ids", "keys with offsets", "rows", "sequences"])
def test_a_torch_without_dlpacks_exchange(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, arguments = CASES[name]
    module: Any = build()
    for seed in (0, 1):
        values(module(*arguments(seed))).sum().backward()
    expected = values(module(*arguments(0)))
    monkeypatch.delattr(Tensor, "__dlpack_c_exchange_api__")
    found = values(module(*arguments(0)))
    assert made_at_once(expected)
    assert not made_at_once(found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [511, 512, 513])
@pytest.mark.parametrize("build", [bag, embedding])
def test_rows_and_updates_where_calls_begin_to_give_the_lock_away(
    build: Callable[..., Any], count: int
) -> None:
    """The bound is kManyPositions of csrc/bindings/unlocked.h."""
    module, every = build(optimizer=optim.SGD(lr=0.5)), torch.arange(ROWS)
    module(every) if build is embedding else module(every.view(-1, 1))  # the rows are here
    for seed in range(2):
        before, asked = module.rows(every), ids(count, seed)
        out = module(asked) if build is embedding else module(asked.view(-1, 1))
        assert made_at_once(out)
        assert torch.equal(out, before[asked])
        out.backward(torch.ones_like(out))
        uses = torch.bincount(asked, minlength=ROWS)
        assert torch.equal(module.rows(every), before - 0.5 * uses[:, None])


@pytest.mark.parametrize("name", CASES)
def test_reads_and_their_counters_are_those_of_lookups_step_by_step(name: str) -> None:
    build, arguments = CASES[name]
    module: Any = build()
    oracle: Any = step_by_step(build())
    for mode in (False, True, False):  # rows are missing at first
        for one in (module, oracle):
            one.train(mode)
        for seed in (0, 1, 0):
            with torch.set_grad_enabled(seed == 0):
                outputs = [values(one(*arguments(seed))) for one in (module, oracle)]
            assert torch.equal(*outputs)
            assert [one.requires_grad for one in outputs] == [mode and seed == 0] * 2
        assert without_seconds(module.stats()) == without_seconds(oracle.stats())
    module.reset_stats()
    module(*arguments(0))
    stats = module.stats()
    assert min(stats["announce_seconds"], stats["compute_seconds"]) > 0


def test_reads_are_single_calls_where_their_rows_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bag()
    module(ids(9, 0).view(3, 3))
    monkeypatch.setattr(module, "find_lookup", None)
    assert module.eval()(ids(9, 0).view(3, 3)).shape == (3, DIM)
    with torch.no_grad():
        assert module.train()(ids(9, 0).view(3, 3)).shape == (3, DIM)


def test_stages_of_forward_calls_are_timed() -> None:
    module = bag()
    module(ids(9, 0).view(3, 3))
    module.reset_stats()
    assert made_at_once(module(ids(9, 0).view(3, 3)))
    stats = module.stats()
    assert min(stats[f"{stage}_seconds"] for stage in ("announce", "plan", "compute")) > 0


SLOW: dict[str, Case] = {
    "max": (lambda: bag(mode="max"), CASES["rows of ids"][1]),
    "weights": (bag, lambda seed: (ids(4, seed).view(2, 2), None, torch.ones(2, 2))),
    "dims that differ": (lambda: collection((DIM, 4)), CASES["keys"][1]),
    "frozen": (
        lambda: frozen(bag()),
        CASES["rows of ids"][1],
    ),
    "sequences of dims that differ": (lambda: sequences((DIM, 4)), CASES["keys"][1]),
    "sequences of some keys": (sequences, lambda seed: (keyed(seed, ("f0", "other", "f1")),)),
    "frozen rows": (lambda: frozen(embedding()), CASES["rows"][1]),
    "eval": (lambda: bag().eval(), CASES["rows of ids"][1]),
    "weighted keys": (
        lambda: collection(is_weighted=True),
        lambda seed: (with_weights(seed),),
    ),
}


def frozen(module: Any) -> Any:
    return module.requires_grad_(False)


def with_weights(seed: int) -> Any:
    batch = keyed(seed)
    weights = torch.ones(batch.values().numel())
    return KeyedJaggedTensor(batch.keys(), batch.values(), weights, lengths=batch.lengths())


@pytest.mark.parametrize("name", SLOW)
def test_other_lookups_are_made_step_by_step(name: str) -> None:
    build, arguments = SLOW[name]
    module: Any = build()
    for _ in range(3):
        out = module(*arguments(0))
        assert not made_at_once(out)
        if values(out).requires_grad:
            values(out).sum().backward()


FAULTS: dict[str, tuple[Callable[[], Any], tuple[Any, ...], str]] = {
    "an id": (bag, (torch.tensor([[1, ROWS]]),), f"{ROWS}"),
    "offsets": (bag, (ids(3, 0), torch.tensor([0, 4])), "offset 4 at position 1 overruns the 3 ids"),
    "no offset": (bag, (ids(3, 0), torch.tensor([], dtype=torch.int64)), "3 ids without a bag"),
    "no end": (
        lambda: bag(include_last_offset=True),
        (ids(3, 0), torch.tensor([], dtype=torch.int64)),
        "at least one offset",
    ),
    "no offsets": (bag, (ids(3, 0),), "1-D ids need offsets"),
    "both": (bag, (ids(4, 0).view(2, 2), torch.tensor([0, 2])), "every row is a bag"),
    "lengths": (
        collection,
        (KeyedJaggedTensor(["f0", "f1"], ids(3, 0), lengths=torch.tensor([1, -1, 2, 1])),),
        "-1",
    ),
    "an id of rows": (embedding, (torch.tensor([1, ROWS]),), f"{ROWS}"),
    "lengths of sequences": (
        sequences,
        (KeyedJaggedTensor(["f0", "f1"], ids(3, 0), lengths=torch.tensor([1, -1, 2, 1])),),
        "-1",
    ),
    "an id of a key": (
        collection,
        (KeyedJaggedTensor(["f0", "f1"], torch.tensor([1, -3]), lengths=torch.tensor([1, 1])),),
        "feature 'f1'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_and_nothing_is_counted(name: str) -> None:
    build, wrong, message = FAULTS[name]
    module = build()
    of: dict[Any, str] = {bag: "offsets", embedding: "rows"}
    right = CASES["a last offset" if name == "no end" else of.get(build, "keys")][1](0)
    for _ in range(2):
        module(*right)
    lookups = module.stats()["lookups"]
    with pytest.raises(InputError, match=message):
        module(*wrong)
    assert module.stats()["lookups"] == lookups
    assert made_at_once(module(*right))


@pytest.mark.parametrize("build", [bag, embedding])
def test_a_lookup_ends_with_its_graph(build: Callable[[], Any]) -> None:
    module = build()
    for _ in range(2):
        out = module(ids(9, 0).view(3, 3)).sum()
    node = out.grad_fn
    while "AtOnce" not in type(node).__name__:
        node = node.next_functions[0][0]
    dropped = weakref.ref(node)
    gc.disable()
    try:
        del out, node
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("build", [bag, embedding])
def test_backward_passes_of_one_lookup(build: Callable[[], Any]) -> None:
    module, oracle = build(), step_by_step(build())
    for one in (module, oracle):
        for _ in range(2):
            out = one(ids(9, 0).view(3, 3))
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
    assert torch.equal(module.rows(torch.arange(ROWS)), oracle.rows(torch.arange(ROWS)))
