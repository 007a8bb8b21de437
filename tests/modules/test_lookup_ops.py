"""Lookups in compiled graphs do what they do elsewhere: the same updates in the same order, once each."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import small_tiers
from tierstore import accumulate, optim
from tierstore.errors import ClosedError, GradientError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)
from tierstore.sparse import KeyedJaggedTensor

SPEC = optim.Adam(lr=0.1)
BACKENDS = ["eager", "aot_eager", "inductor"]
EVERY = torch.arange(ROWS)


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def embedding(**options: Any) -> TieredEmbedding:
    return TieredEmbedding(ROWS, 4, config=small_tiers([4], SPEC, 40), optimizer=SPEC, **options)


def bag(mode: str = "sum", **options: Any) -> TieredEmbeddingBag:
    config = small_tiers([4], SPEC, 40)
    return TieredEmbeddingBag(ROWS, 4, mode=mode, config=config, optimizer=SPEC, **options)


def collection(kind: Any, weighted: bool = False, **options: Any) -> Any:
    """Two tables of two row layouts and three features, one of which is in both tables."""
    config = EmbeddingBagConfig if kind is EmbeddingBagCollection else EmbeddingConfig
    options |= {"is_weighted": True} if weighted else {}
    tables = [config(ROWS, 4, "t", feature_names=["a", "b"]), config(ROWS, 8, "u", feature_names=["c", "a"])]
    return kind(tables, config=small_tiers([4, 8], SPEC, 60), optimizer=SPEC, **options)


def ids_of(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def rows_of(module: Any) -> list[Tensor]:
    names = module.table_names()
    every = [None] if len(names) == 1 else names
    states = [module.optimizer_rows(EVERY, name).values() for name in every]
    return [*(module.rows(EVERY, name) for name in every), *(one for state in states for one in state)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def same_training(
    make: Callable[[], Any],
    call: Callable[[Any, Any], Tensor],
    inputs: list[Any],
    backend: str,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Any:
    """Train a compiled and a plain module; return the compiled one. Sums have exact values, whatever the
    order in which a compiler adds: tests take integers as weights of the loss."""
    module, plain = make(), make()
    compiled = torch.compile(lambda given: call(module, given), backend=backend, fullgraph=True)
    for given in inputs:
        backward(compiled(given))
        backward(call(plain, given))
    assert_same(rows_of(module), rows_of(plain))
    assert module.fused_optimizer.num_updates == plain.fused_optimizer.num_updates
    assert module.anchor.grad is None
    return module


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_table_looked_up_twice_is_updated_twice_in_order(backend: str) -> None:
    """Adam's second update of a row depends on the first: joined or reordered lookups have other bits."""

    def call(module: Any, ids: Tensor) -> Tensor:
        first, second = module(ids), module(ids)
        other = module(ids + 1)
        return (first * 3).sum() + (other * second).sum()

    module = same_training(
        lambda: embedding(padding_idx=7), call, [ids_of(n, 5) % 50 for n in range(4)], backend
    )
    assert module.fused_optimizer.num_updates == 12


def test_inductor_keeps_the_order_of_updates() -> None:
    """It would compute the gradient of the first lookup first here: rows would differ by 0.1."""

    def call(module: Any, ids: Tensor) -> Tensor:
        first, second, other = module(ids), module(ids), module(ids + 1)
        return (first.sin() * 3).sum() + (other * second.cos()).sum()

    module, plain = embedding(), embedding()
    compiled = torch.compile(lambda ids: call(module, ids), fullgraph=True)
    for ids in [ids_of(n, 5) % 50 for n in range(3)]:
        compiled(ids).backward()
        call(plain, ids).backward()
    torch.testing.assert_close(rows_of(module), rows_of(plain))


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_sample_weights_get_gradients(backend: str) -> None:
    def call(module: Any, given: Any) -> Tensor:
        ids, weights = given
        return (module(ids, per_sample_weights=weights * 2) * 3).sum()

    def inputs() -> list[Any]:
        return [(ids_of(n, 3 + n, 2), torch.rand(3 + n, 2, requires_grad=True)) for n in range(4)]

    torch.manual_seed(0)
    given = inputs()
    same_training(bag, call, given, backend)
    torch.manual_seed(0)
    alone, plain = inputs(), bag()
    for one in alone:
        call(plain, one).backward()
    for (_, mine), (_, other) in zip(given, alone, strict=True):
        assert torch.equal(mine.grad / 2, other.grad)  # both models of same_training gave theirs


@pytest.mark.parametrize("mode", ["mean", "max"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bags_with_offsets(mode: str, backend: str) -> None:
    def call(module: Any, given: Any) -> Tensor:
        return (module(*given) * 3).sum()

    inputs = [(ids_of(n, 9), torch.tensor([0, 2, 2, 4 + n])) for n in range(4)]
    same_training(lambda: bag(mode), call, inputs, backend)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_collections_of_bags(weighted: bool, backend: str) -> None:
    def call(module: Any, keyed: Any) -> Tensor:
        found = module(keyed)
        return (found["a@t"] * 3).sum() + (found["c"] * 2).sum() + found.values().sum()

    inputs = [keyed_batch(n, ["c", "x", "a", "b"], 3 + n, weighted=weighted).ours for n in range(5)]
    same_training(lambda: collection(EmbeddingBagCollection, weighted), call, inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collections_of_rows(backend: str) -> None:
    """Gradients of a feature that the loss leaves out are zeros: Adam moves its rows."""

    def call(module: Any, keyed: Any) -> Tensor:
        found = module(keyed)
        return (found["a@t"].values() * 3).sum() + (found["c"].values() * found["c"].weights()[:, None]).sum()

    inputs = [keyed_batch(n, ["c", "x", "a", "b"], 3 + n).ours for n in range(5)]
    same_training(lambda: collection(EmbeddingCollection, need_indices=True), call, inputs, backend)


def test_rows_whose_count_is_not_known_need_an_option_of_the_compiler() -> None:
    def keyed(n: int) -> KeyedJaggedTensor:
        batch = keyed_batch(n, ["a", "b", "c"]).ours
        return KeyedJaggedTensor(list(batch.keys()), batch.values(), lengths=batch.lengths())

    def call(module: Any, batch: Any) -> Tensor:
        return sum((one.values() * 3).sum() for one in module(batch).values())  # type: ignore[return-value]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        make = lambda: collection(EmbeddingCollection)  # noqa: E731
        same_training(make, call, [keyed(n) for n in range(3)], "aot_eager")


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_features_whose_examples_share_bags_break_the_graph_and_train_the_same(kind: Any) -> None:
    def call(module: Any, keyed: Any) -> Tensor:
        found = module(keyed)
        return (found["c"] * 3).sum() if kind is EmbeddingBagCollection else found["c"].values().sum()

    module, plain = collection(kind), collection(kind)
    compiled = torch.compile(lambda keyed: call(module, keyed), backend="aot_eager")
    for n in range(3):
        keyed = keyed_batch(n, ["a", "b", "c"], deduplicated=True).ours
        compiled(keyed).backward()
        call(plain, keyed).backward()
    assert_same(rows_of(module), rows_of(plain))


def test_a_batch_that_is_made_inside_of_the_graph() -> None:
    def call(module: Any, ids: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=torch.full_like(ids, 1))
        return (module(keyed).values() * 3).sum()

    make = lambda: collection(EmbeddingBagCollection)  # noqa: E731
    same_training(make, call, [ids_of(n, 3 * n) for n in (2, 3, 4)], "aot_eager")


def test_batch_sizes_that_change_compile_twice() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = bag()
    compiled = torch.compile(lambda ids: module(ids).sum(), backend=counter, fullgraph=True)
    for size in (3, 5, 8, 13, 21):
        compiled(ids_of(size, size, 2)).backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("how", "backend"),
    [("eval", "inductor"), ("eval", "eager"), ("no_grad", "aot_eager"), ("inference_mode", "aot_eager")],
)
def test_reading_changes_nothing(how: str, backend: str) -> None:
    modules = [embedding(), bag(), collection(EmbeddingBagCollection), collection(EmbeddingCollection)]
    keyed = keyed_batch(0, ["a", "b", "c"]).ours
    inputs = [ids_of(0, 3, 2), ids_of(1, 3, 2), keyed, keyed]
    without = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for module, given in zip(modules, inputs, strict=True):
        module.train(how != "eval")
        before = rows_of(module)
        with without[how]():
            found = torch.compile(module, backend=backend, fullgraph=True)(given)
            expected = module(given)
        leaves, others = (torch.utils._pytree.tree_leaves(one) for one in (found, expected))
        for mine, other in zip(leaves, others, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert torch.equal(mine, other)
                assert not mine.requires_grad
        assert_same(rows_of(module), before)


def test_accumulated_gradients_update_once() -> None:
    module, plain = embedding(), embedding()
    compiled = torch.compile(lambda ids: (module(ids) * 3).sum(), backend="aot_eager", fullgraph=True)
    for ids in [ids_of(n, 6) for n in range(3)]:
        with accumulate(module):
            compiled(ids).backward()
            compiled(ids + 0).backward()
        with accumulate(plain):
            (plain(ids) * 3).sum().backward()
            (plain(ids) * 3).sum().backward()
    assert_same(rows_of(module), rows_of(plain))
    assert module.fused_optimizer.num_updates == 3


def test_tables_are_frozen_and_trained_again_by_the_same_graph() -> None:
    module = embedding()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda ids: module(ids).sum(), backend=counter, fullgraph=True)
    ids, before = ids_of(0, 4), rows_of(module)
    module.requires_grad_(False)
    compiled(ids).backward()
    assert_same(rows_of(module), before)
    module.requires_grad_(True)
    compiled(ids).backward()
    assert module.fused_optimizer.num_updates == 1


def test_two_modules_of_one_name_do_not_mix() -> None:
    one, two = embedding(), embedding()
    compiled = torch.compile(lambda module, ids: module(ids).sum(), backend="aot_eager", fullgraph=True)
    before = rows_of(two)
    compiled(one, ids_of(0, 4)).backward()
    assert (one.fused_optimizer.num_updates, two.fused_optimizer.num_updates) == (1, 0)
    assert_same(rows_of(two), before)
    compiled(two, ids_of(0, 4)).backward()
    assert (one.fused_optimizer.num_updates, two.fused_optimizer.num_updates) == (1, 1)


def test_a_module_in_place_of_another_is_found() -> None:
    model = nn.Sequential(embedding())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(ids_of(0, 4)).sum().backward()
    model[0].close()
    with pytest.raises(ClosedError):
        compiled(ids_of(0, 4))
    model[0] = embedding(seed=5)
    compiled(ids_of(0, 4)).sum().backward()
    assert model[0].fused_optimizer.num_updates == 1
    with torch.no_grad():
        assert torch.equal(compiled(EVERY), model[0].rows(EVERY))


def test_graphs_keep_no_module_alive() -> None:
    module = embedding()
    program = torch.export.export(module.eval(), (ids_of(0, 4),))
    handle, gone = module.handle, weakref.ref(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(ids_of(0, 4))
    del module, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    with pytest.raises(ClosedError, match=handle):
        program.module()(ids_of(0, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_released_with_the_graph(backend: str) -> None:
    module = bag()
    compiled = torch.compile(lambda ids: module(ids).sin().sum(), backend=backend, fullgraph=True)
    made: list[weakref.ref[Any]] = []
    make_lookup = module.make_lookup

    def noted(*args: Any) -> Any:
        lookup = make_lookup(*args)
        made.append(weakref.ref(lookup))
        return lookup

    module.make_lookup = noted
    for n in range(3):
        loss = compiled(ids_of(n, 5, 2))
        assert made[n]().parts[0].rows.held
        if n == 1:
            loss.backward(retain_graph=True)
            loss.backward()
        if n == 2:
            loss.backward()
        del loss
        assert made[n]() is None
    assert module.fused_optimizer.num_updates == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_several_forward_calls_before_one_backward(backend: str) -> None:
    module, plain = embedding(), embedding()
    compiled = torch.compile(lambda ids: (module(ids) * 3).sum(), backend=backend, fullgraph=True)
    for n in range(3):
        (compiled(ids_of(n, 5)) + compiled(ids_of(n + 1, 5))).backward()
        ((plain(ids_of(n, 5)) * 3).sum() + (plain(ids_of(n + 1, 5)) * 3).sum()).backward()
    assert_same(rows_of(module), rows_of(plain))


def test_copies_of_what_a_graph_saved_are_refused() -> None:
    module = embedding()
    before = rows_of(module)
    compiled = torch.compile(lambda ids: module(ids).sum(), backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda copy: copy):
        loss = compiled(ids_of(0, 4))
    with pytest.raises(GradientError, match="copied"):
        loss.backward()
    assert_same(rows_of(module), before)


def test_a_wrong_id_is_an_error_of_the_user() -> None:
    compiled = torch.compile(embedding(), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=f"id {ROWS}"):
        compiled(torch.tensor([ROWS]))
