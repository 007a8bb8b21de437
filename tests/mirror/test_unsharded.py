"""What torchrec's own tests ask of unsharded collections: torchrec's and ours give the same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torchrec.fx import Tracer
from torchrec.fx import symbolic_trace as torchrecs_trace

import tierstore
from tests.sparse.test_behaviours import plain
from tierstore import ConfigError, TierConfig
from tierstore import torchrec as mirror

Behaviour = Callable[[Any], Any]
BEHAVIOURS: list[Behaviour] = []


@pytest.fixture(autouse=True)
def in_memory() -> Iterator[None]:
    tierstore.set_default_config(TierConfig(hbm="1MiB", ssd="64MiB", engine="memory"))
    yield
    tierstore.set_default_config(None)


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS.append(function)
    return function


def bags(lib: Any, *tables: tuple[str, int, list[str]], **more: Any) -> Any:
    """Tables of 10 rows, whose rows count up from their name's last character."""
    configs = [
        torchrec.EmbeddingBagConfig(10, dim, name=name, feature_names=features)
        for name, dim, features in tables
    ]
    return filled(lib.EmbeddingBagCollection(tables=configs, **more))


def rows(lib: Any, *tables: tuple[str, int, list[str]], **more: Any) -> Any:
    configs = [torchrec.EmbeddingConfig(10, dim, name=name, feature_names=keys) for name, dim, keys in tables]
    return filled(lib.EmbeddingCollection(tables=configs, **more))


def filled(module: Any) -> Any:
    if module.device.type != "meta":
        state = {
            name: torch.arange(value.numel()).view(value.shape).float() + ord(name[-8])
            for name, value in module.state_dict().items()
        }
        module.load_state_dict(state)
    return module


def batch(lib: Any, keys: list[str], device: str = "cpu", weighted: bool = False) -> Any:
    """Bags of 2, 0, 1, 1, 1 and 3 ids."""
    weights = torch.tensor([0.5, 0.25, 2.0, 1.5, 4.0, 0.75, 0.125, 3.0], device=device) if weighted else None
    return lib.KeyedJaggedTensor.from_offsets_sync(
        keys,
        torch.arange(8, device=device),
        torch.tensor([0, 2, 2, 3, 4, 5, 8], device=device),
        weights,
    )


T1, T2, BOTH = ("t1", 3, ["f1"]), ("t2", 4, ["f2"]), ("t1", 3, ["f1", "f2"])


@behaviour
def tables_of_their_own(lib: Any) -> Any:
    out = bags(lib, T1, T2)(batch(lib, ["f1", "f2"]))
    return out, out.offset_per_key(), out.to_dict()


@behaviour
def features_that_share_a_table(lib: Any) -> Any:
    return bags(lib, BOTH)(batch(lib, ["f1", "f2"]))


@behaviour
def tables_that_share_a_feature(lib: Any) -> Any:
    return bags(lib, T1, ("t2", 4, ["f1"]))(batch(lib, ["f1"])), rows(lib, T1, ("t2", 3, ["f1"]))(
        batch(lib, ["f1"])
    )


@behaviour
def keys_in_another_order_and_more_of_them(lib: Any) -> Any:
    return bags(lib, T1, T2)(batch(lib, ["f2", "other", "f1"]))


@behaviour
def weighted_bags(lib: Any) -> Any:
    module = bags(lib, ("t1", 3, ["f1", "f3"]), T2, is_weighted=True)
    return module(batch(lib, ["f1", "f3", "f2"], weighted=True)), module.is_weighted()


@behaviour
def empty_batches(lib: Any) -> Any:
    none = lib.KeyedJaggedTensor(["f1", "f2"], torch.tensor([]).long(), lengths=torch.zeros(6).int())
    return bags(lib, T1, T2)(none), rows(lib, T1, ("t2", 3, ["f2"]))(none)


@behaviour
def rows_one_by_one(lib: Any) -> Any:
    module = rows(lib, BOTH, ("t2", 3, ["f2"]))
    return (
        module(features=batch(lib, ["f1", "f2"])),
        module.embedding_names_by_table(),
        module.embedding_dim(),
    )


@behaviour
def rows_with_their_ids(lib: Any) -> Any:
    module = rows(lib, BOTH, ("t2", 3, ["f2"]), need_indices=True)
    return module(batch(lib, ["f1", "f2"])), module.need_indices()


@behaviour
def what_modules_say_of_themselves(lib: Any) -> Any:
    pooled, single = bags(lib, T1, T2), rows(lib, T1)
    configs = [*pooled.embedding_bag_configs(), *single.embedding_configs()]
    return (
        [(c.name, c.num_embeddings, c.embedding_dim, list(c.feature_names)) for c in configs],
        [*pooled.embedding_bags], [*single.embeddings],
        [pooled.device.type, single.device.type, pooled.is_weighted(), single.need_indices()],
    )  # fmt: skip


@behaviour
def state_dicts(lib: Any) -> Any:
    return [
        {name: value for name, value in module.state_dict().items()}
        for module in (bags(lib, T1, T2), rows(lib, BOTH), nn.ModuleDict({"inside": bags(lib, T1)}))
    ]


@behaviour
def the_meta_device(lib: Any) -> Any:
    module = bags(lib, T1, T2, is_weighted=True, device=torch.device("meta"))
    out = module(batch(lib, ["f1", "f2"], "meta", weighted=True))
    single = rows(lib, T1, ("t2", 3, ["f2"]), device=torch.device("meta"))
    found = single(batch(lib, ["f1", "f2"], "meta"))
    return out, module.device.type, single.device.type, found


@behaviour
def the_meta_device_of_a_context(lib: Any) -> Any:
    with torch.device("meta"):
        inside = bags(lib, T1)
    return [module.device.type for module in (inside, bags(lib, T1))]


def raised(call: Callable[[], Any], kind: type[Exception] = Exception) -> bool:
    try:
        call()
    except kind:
        return True
    return False


@behaviour
def mistakes(lib: Any) -> Any:
    calls: list[Callable[[], Any]] = [
        lambda: bags(lib, T1, ("t1", 4, ["f2"])),
        lambda: rows(lib, T1, ("t1", 3, ["f2"])),
    ]
    return [raised(call, ValueError) for call in calls], raised(lambda: bags(lib, T1)(batch(lib, ["other"])))


class Over(nn.Module):
    """Passes a batch on to a collection, and its output on to a layer, as user code does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.sparse = module
        self.dense = nn.Linear(7, 2, bias=False)
        nn.init.ones_(self.dense.weight)

    def forward(self, features: Any) -> Any:
        out = self.sparse(features)
        return self.dense(torch.cat([out["f2"], out["f1"]], dim=1)), out.values(), out.keys()


class Built(nn.Module):
    """Builds its batch and regroups what it gets: both are nodes of a traced graph."""

    def __init__(self, lib: Any) -> None:
        super().__init__()
        self.sparse, self.lib = bags(lib, T1, T2), lib

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> Any:
        features = self.lib.KeyedJaggedTensor(keys=["f1", "f2"], values=values, lengths=lengths)
        out = self.sparse(features)
        joined = self.lib.KeyedTensor(out.keys(), [3, 4], out.values() * 2)
        return self.lib.KeyedTensor.regroup([out], [["f2"], ["f1", "f2"]]), joined["f2"]


class Rows(nn.Module):
    def __init__(self, lib: Any) -> None:
        super().__init__()
        self.sparse = rows(lib, BOTH)

    def forward(self, features: Any) -> Any:
        return self.sparse(features)["f1"].to_padded_dense(3), self.sparse(features)


def leaf_trace(module: nn.Module) -> torch.fx.GraphModule:
    tracer = Tracer(leaf_modules=["EmbeddingBagCollection", "EmbeddingCollection"])
    return torch.fx.GraphModule(module, tracer.trace(module))


TRACERS = [torch.fx.symbolic_trace, torchrecs_trace, leaf_trace]


@pytest.mark.parametrize("ask", BEHAVIOURS, ids=lambda ask: ask.__name__)
def test_answers_agree(ask: Behaviour) -> None:
    assert plain(ask(mirror)) == plain(ask(torchrec))


@pytest.mark.parametrize("trace", TRACERS, ids=["torch", "torchrec", "leaves"])
@pytest.mark.parametrize("own", [tierstore, torchrec], ids=["our batch", "torchrec's batch"])
def test_modules_are_traced_by_fx(trace: Any, own: Any) -> None:
    ids, lengths = torch.arange(8), torch.tensor([2, 0, 1, 1, 1, 3])
    for make, inputs in (
        (lambda lib: Over(bags(lib, T1, T2)), lambda lib: (batch(lib, ["f1", "f2"]),)),
        (Rows, lambda lib: (batch(lib, ["f1", "f2"]),)),
        (Built, lambda lib: (ids, lengths)),
    ):
        lib = tierstore if make is Built and own is tierstore else mirror
        module = make(lib)
        traced = trace(module)
        found = plain(traced(*inputs(own)))
        assert found == plain(module(*inputs(own)))
        assert found == plain(make(torchrec)(*inputs(torchrec)))
        kinds = {node.target for node in traced.graph.nodes if node.op == "call_module"}
        assert "sparse" in kinds, "the lookup is a node of the graph"


def test_a_traced_module_trains_its_rows() -> None:
    module = Over(tierstore.EmbeddingBagCollection(
        [tierstore.EmbeddingBagConfig(10, 3, "t1", feature_names=["f1"]),
         tierstore.EmbeddingBagConfig(10, 4, "t2", feature_names=["f2"])],
        optimizer=tierstore.optim.SGD(lr=0.1),
    ))  # fmt: skip
    traced = torch.fx.symbolic_trace(module)
    before = module.sparse.rows([1], "t1")
    traced(batch(tierstore, ["f1", "f2"]))[0].sum().backward()
    torch.testing.assert_close(module.sparse.rows([1], "t1"), before - 0.1 * 2)


def test_rows_on_the_meta_device_are_not_made_up() -> None:
    module = bags(mirror, T1, device=torch.device("meta"))
    with pytest.raises(ConfigError, match="meta device"):
        module(batch(mirror, ["f1"]))
