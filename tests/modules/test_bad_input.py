"""Wrong input gets a message that names the feature and what is wrong with it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.modules.module_oracles import all_rows, small_tiers
from tierstore import TierConfig, accumulate, optim
from tierstore.errors import ClosedError, ConfigError, GradientError, InputError
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
    TieredEmbedding,
    TieredEmbeddingBag,
)
from tierstore.sparse import KeyedJaggedTensor

ROWS = 60
SGD = optim.SGD(lr=0.01)
CONFIG = small_tiers([4], SGD)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def bag(**options: Any) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(ROWS, 4, config=CONFIG, optimizer=SGD, name="item", **options)


BAG_CALLS: list[tuple[tuple[Any, ...], str]] = [
    ((ints(1, 60), ints(0)), r"item: id 60 at position 1 is out of range \[0, 60\)"),
    ((ints(1, -2), ints(0)), r"item: id -2 at position 1 is out of range \[0, 60\)"),
    ((torch.tensor([[1, 2**31 - 1]], dtype=torch.int32),), r"id 2147483647 at position 1"),
    ((torch.rand(3), ints(0)), "item: ids must be int64 or int32, got torch.float32"),
    ((torch.tensor([True]), ints(0)), "got torch.bool"),
    (([1, 2], ints(0)), "item: ids must be a torch.Tensor, not list"),
    ((ints(1).to("meta"), ints(0)), "item: ids are on meta, but the tables on the CPU"),
    ((ints(1, 2),), "item: 1-D ids need offsets"),
    ((ints(1, 2).view(1, 2), ints(0)), "with 2-D ids every row is a bag"),
    ((ints(1).view(1, 1, 1),), r"one or two dimensions, got shape \(1, 1, 1\)"),
    ((ints(1, 2), torch.rand(1)), "item: offsets must be int64 or int32"),
    ((ints(1, 2), ints(0).view(1, 1)), "offsets must have one dimension"),
    ((ints(1, 2), ints(1)), "the first offset must be 0, got 1"),
    ((ints(1, 2), ints(0, 3)), "offset 3 at position 1 overruns the 2 ids"),
    ((ints(1, 2), ints(0, 2, 1)), "offsets must not decrease, but 2 is followed by 1 at position 2"),
    ((ints(1, 2), ints()), "2 ids without a bag; offsets are empty"),
    ((ints(1, 2), ints(0), torch.rand(3)), r"per_sample_weights have shape \(3,\), ids \(2,\)"),
    ((ints(1, 2), ints(0), ints(1, 2)), "per_sample_weights must be floats, got torch.int64"),
]


@pytest.mark.parametrize(("call", "message"), BAG_CALLS)
def test_bags(call: tuple[Any, ...], message: str) -> None:
    with bag(mode="sum") as module:
        module(ints(3, 4), ints(0)).sum().backward()
        rows, stats = all_rows(module, ROWS), module.stats()
        for training in (True, False):
            with pytest.raises(InputError, match=message):
                module.train(training)(*call)
        after = module.stats()
        assert {k: after[k] for k in ("lookups", "tiers")} == {k: stats[k] for k in ("lookups", "tiers")}
        assert torch.equal(all_rows(module, ROWS), rows)
        assert module.fused_optimizer.num_updates == 1


def test_weights_need_sum_and_last_offsets_must_fit() -> None:
    with bag() as module, pytest.raises(InputError, match="need mode 'sum', not 'mean'"):
        module(ints(1, 2), ints(0), torch.rand(2))
    with bag(include_last_offset=True) as module:
        with pytest.raises(InputError, match="the last offset is 1 but there are 2 ids"):
            module(ints(1, 2), ints(0, 1))
        with pytest.raises(InputError, match="there must be at least one offset"):
            module(ints(1, 2), ints())


def test_embedding() -> None:
    with TieredEmbedding(ROWS, 4, config=CONFIG, name="item") as module:
        with pytest.raises(InputError, match=r"item: id 60 at position 3 is out of range \[0, 60\)"):
            module(ints(1, 2, 3, 60).view(2, 2))
        with pytest.raises(InputError, match=r"item: ids must be int64 or int32, got torch\.float32"):
            module(torch.rand(2))


def collections(**options: Any) -> list[Callable[[], Any]]:
    return [
        lambda: EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a", "b"])], config=CONFIG, **options
        ),
        lambda: EmbeddingCollection(
            [EmbeddingConfig(ROWS, 4, "t", feature_names=["a", "b"])], config=CONFIG, **options
        ),
    ]


KEYED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(1, 2, 61), lengths=ints(1, 2)),
        r"feature 'b': id 61 at position 1 is out of range \[0, 60\)",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(-1, 2, 3), lengths=ints(1, 2)),
        r"feature 'a': id -1 at position 0 is out of range \[0, 60\)",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "c"], ints(1, 2, 3), lengths=ints(1, 2)),
        r"feature 'b' of table 't' is missing; the KeyedJaggedTensor has \['a', 'c'\]",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(1, 2, 3), lengths=ints(1, 3)),
        "add up to 4 but there are 3 values: key 'b' has lengths of 3",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(1, 2, 3), lengths=ints(2, -1, 2, 0)),
        "bag 1 of key 'a' has the negative length -1",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(1, 2, 3), offsets=ints(0, 2, 1, 2, 3)),
        "bag 1 of key 'a'",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(1, 2, 3), offsets=ints(1, 2, 4)),
        "offsets must begin with 0, got 1",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], torch.rand(3), lengths=ints(1, 2)),
        "must be int64 or int32, got torch.float32",
    ),
    (
        lambda: KeyedJaggedTensor(["a", "b"], ints(1, 2, 3).view(3, 1), lengths=ints(1, 2)),
        "must have one dimension",
    ),
    (lambda: {"a": ints(1)}, "expected a KeyedJaggedTensor"),
]


@pytest.mark.parametrize(("make", "message"), KEYED)
def test_collections(make: Callable[[], Any], message: str) -> None:
    for build in collections():
        with build() as module:
            rows = all_rows(module, ROWS, "t")
            for training in (True, False):
                with pytest.raises(InputError, match=message):
                    module.train(training)(make())
            assert module.stats()["lookups"] == 0
            assert torch.equal(all_rows(module, ROWS, "t"), rows)


def test_batches_of_different_sizes_need_inverse_indices() -> None:
    differing = KeyedJaggedTensor(
        ["a", "b"], ints(1, 2, 3), lengths=ints(1, 1, 1), stride_per_key_per_rank=[[1], [2]]
    )
    bags, rows = (build() for build in collections())
    with bags, rows:
        with pytest.raises(InputError, match=r"different batch sizes: \{'a': 1, 'b': 2\}"):
            bags(differing)
        assert rows(differing)["b"].lengths().tolist() == [1, 1]
        wrong = KeyedJaggedTensor(
            ["a", "b"],
            ints(1, 2, 3),
            lengths=ints(1, 1, 1),
            stride_per_key_per_rank=[[1], [2]],
            inverse_indices=(["a", "b"], ints(0, 0, 1, 2).view(2, 2)),
        )
        with pytest.raises(InputError, match="inverse index 2 of key 'b' is outside its 2 bags"):
            bags(wrong)
        partial = KeyedJaggedTensor(
            ["a", "b"],
            ints(1, 2, 3),
            lengths=ints(1, 1, 1),
            stride_per_key_per_rank=[[1], [2]],
            inverse_indices=(["a"], ints(0, 0).view(1, 2)),
        )
        with pytest.raises(InputError, match="no row for feature 'b'"):
            bags(partial)


def test_weights_of_a_weighted_collection() -> None:
    weighted = collections(is_weighted=True)[0]
    plain = KeyedJaggedTensor(["a", "b"], ints(1, 2), lengths=ints(1, 1))
    with weighted() as module:
        with pytest.raises(InputError, match="has no weights"):
            module(plain)
        for weights in (ints(1, 2), torch.rand(2, 2)):
            keyed = KeyedJaggedTensor(["a", "b"], ints(1, 2), weights, lengths=ints(1, 1))
            with pytest.raises(InputError, match="must be floats in one dimension"):
                module(keyed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": 1.0}, "max_norm is not supported"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq is not supported"),
        ({"device": "meta"}, "device is meta"),
        ({"dtype": torch.float64}, "weights of a table are"),
        ({"mode": "median"}, "mode is 'median'; it must be one of 'sum', 'mean', 'max'"),
        ({"padding_idx": 60}, "padding_idx 60 is outside the 60 rows"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "must be one of tierstore.optim"),
        ({"init": "xavier"}, "init is 'xavier'"),
        (
            {"config": TierConfig(hbm=100, engine="memory")},
            "below the minimum for these tables; raise it to at least [0-9]+ bytes",
        ),
        ({"_weight": torch.zeros(3, 4)}, "size mismatch"),
        ({"num_embeddings": 1e12}, r"num_embeddings 1000000000000.0 is not an integer in \[1, 2\*\*48\]"),
        ({"config": {"hbm": "1MiB"}}, "give a TierConfig"),
    ],
)
def test_modules_that_cannot_be_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TieredEmbeddingBag(**({"num_embeddings": ROWS, "embedding_dim": 4, "config": CONFIG} | arguments))


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([EmbeddingBagConfig(9, 4, "t"), EmbeddingBagConfig(9, 4, "t")], {}, "Duplicate table name t"),
        ([EmbeddingBagConfig(9, 4)], {}, "must not be empty"),
        ([EmbeddingBagConfig(9, 4, "a.b")], {}, "nor contain a dot"),
        (
            [EmbeddingBagConfig(9, 4, "t", pooling=PoolingType.MAX)],
            {"is_weighted": True},
            "max pooling has no weights",
        ),
        ([EmbeddingBagConfig(9, 4, "t")], {"device": "mps"}, "device is mps"),
        ([], {}, "at least one table"),
    ],
)
def test_collections_that_cannot_be_made(tables: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(tables, config=CONFIG, **options)


def test_rows_of_wrong_shape_or_id() -> None:
    with bag() as module:
        before = all_rows(module, ROWS)
        for call, message in (
            (lambda: module.rows([60]), r"id 60 at position 0 is out of range \[0, 60\)"),
            (lambda: module.rows(torch.rand(2)), "ids must be a 1-D int64 or int32 tensor"),
            (
                lambda: module.load_rows([1], torch.zeros(1, 3)),
                r"weight has shape \(1, 3\); it must be \(1, 4\)",
            ),
            (lambda: module.load_rows([1, 1], torch.zeros(2, 4)), "ids repeat"),
            (lambda: module.load_rows([-1], torch.zeros(1, 4)), "id -1 at position 0"),
            (
                lambda: module.load_rows([1], torch.zeros(1, 4), {"sum": torch.zeros(1)}),
                "optimizer state has",
            ),
        ):
            with pytest.raises(InputError, match=message):
                call()
        assert torch.equal(all_rows(module, ROWS), before)
        assert module.rows([]).shape == (0, 4)


def test_an_update_after_close_is_refused_instead_of_lost() -> None:
    for module in (bag(mode="sum"), TieredEmbedding(ROWS, 4, config=CONFIG, optimizer=SGD)):
        out = module(ints(1, 2).view(1, 2))
        module.close()
        with pytest.raises(ClosedError, match="the tables are closed"):
            out.sum().backward()


@pytest.mark.parametrize("passes", ["plain", "accumulated"])
def test_an_update_after_going_back_to_a_commit_is_refused_and_not_counted(
    passes: str, tmp_path: Path
) -> None:
    config = TierConfig(hbm="64KiB", ssd="64MiB", path=tmp_path)
    with TieredEmbeddingBag(ROWS, 4, mode="sum", config=config, optimizer=optim.Adam(lr=0.1)) as module:
        first, before = module.commit(), all_rows(module, ROWS)

        def lookup() -> torch.Tensor:
            return module(ints(3, 4).view(1, 2)).sum()

        def go_back() -> None:
            module.engine.go_to(first)
            module.take_updates()

        def plain() -> None:
            loss = lookup()
            go_back()
            loss.backward()

        def accumulated() -> None:
            with accumulate(module):
                lookup().backward()
                go_back()

        lookup().backward()
        with pytest.raises(ClosedError, match="make that call again"):
            {"plain": plain, "accumulated": accumulated}[passes]()
        assert module.fused_optimizer.num_updates == module.engine.uncommitted == 0
        assert torch.equal(all_rows(module, ROWS), before)
        lookup().backward()
        assert module.fused_optimizer.num_updates == module.engine.uncommitted == 1


def test_gradients_that_are_not_finite() -> None:
    """They stay in their own rows, and are reported if asked."""
    for checked in (False, True):
        config = small_tiers([4], optim.SGD(), check_gradients=checked)
        options: Any = {"config": config, "optimizer": optim.SGD(lr=0.01)}
        with TieredEmbeddingBag(ROWS, 4, mode="sum", name="item", **options) as module:
            before = all_rows(module, ROWS)
            out = module(ints(1, 2, 3).view(3, 1))
            loss = (out * torch.tensor([[1.0], [float("nan")], [1.0]])).sum()
            if checked:
                with pytest.raises(GradientError, match="item id 2"):
                    loss.backward()
            else:
                loss.backward()
            after = all_rows(module, ROWS)
            good = [1, 3]
            torch.testing.assert_close(after[good], before[good] - 0.01)
            rest = [0, *range(4, ROWS)]
            assert torch.equal(after[rest], before[rest])
            assert torch.equal(after[2], before[2]) if checked else after[2].isnan().all()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([ints(1, 2), ints(3)], layout=torch.jagged)


class Stand(torch.Tensor):
    """Stands for another tensor, as a DTensor does: it says that it is on the CPU, and has no memory."""

    inner: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> Stand:
        made = torch.Tensor._make_wrapper_subclass(Stand, tensor.shape, dtype=tensor.dtype)
        made.inner = tensor
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*[one.inner if isinstance(one, Stand) else one for one in args], **(kwargs or {}))
        return Stand.of(made) if isinstance(made, torch.Tensor) else made


@pytest.mark.parametrize("training", [True, False])
def test_tensors_without_memory_of_their_own(training: bool) -> None:
    """Kernels would read at address 0."""
    message = "must be a plain tensor, with memory of its own, not a "
    pairs = ints(1, 2, 3, 4).view(2, 2)
    with bag(mode="sum") as bags, TieredEmbedding(ROWS, 4, config=CONFIG, optimizer=SGD) as rows:
        for ids, kind in (
            (nested(), "nested"),
            (pairs.to_sparse(), "Tensor .torch.sparse"),
            (Stand.of(pairs), "Stand"),
        ):
            for module in (bags, rows):
                with pytest.raises(InputError, match=f"ids {message}{kind}"):
                    module.train(training)(ids)
        with pytest.raises(InputError, match=f"item: offsets {message}Stand"):
            bags(ints(1, 2), Stand.of(ints(0, 1)))
        with pytest.raises(InputError, match=f"weights of ids {message}Stand"):
            bags(pairs, None, Stand.of(torch.rand(2, 2)))
        assert bags.stats()["lookups"] == rows.stats()["lookups"] == 0
    for make in collections(optimizer=SGD):
        with make() as module:
            module.train(training)
            for _ in range(2):  # the second batch with these keys may be one native call
                for values, lengths in (
                    (Stand.of(ints(1, 2)), ints(1, 1)),
                    (ints(1, 2), Stand.of(ints(1, 1))),
                ):
                    with pytest.raises(InputError, match=message):
                        module(KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
                module(KeyedJaggedTensor(["a", "b"], ints(1, 2), lengths=ints(1, 1)))
