"""Names of users that are like those that tierstore makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import (
    ConfigError,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TierConfig,
    optim,
)
from tierstore.sharding import (
    DistributedModelParallel,
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    TableSharding,
    column_wise,
    construct_plan,
    row_wise,
    shard,
    table_wise,
)

ODD = ["t", "t[0:4", "[0:4]", "(no shard)", "tables", "t/rank00000", "t@u", "step", "rank00000", "t ", "é"]


def bags(names: Sequence[str], dim: int = 8) -> Any:
    configs = [EmbeddingBagConfig(20, dim, name, feature_names=[f"of {name}"]) for name in names]
    return tierstore.EmbeddingBagCollection(
        configs, config=cases.MEMORY, optimizer=optim.Adam(lr=0.1), seed=3
    )


def features(names: Sequence[str], ranks: Sequence[int]) -> KeyedJaggedTensor:
    """Three bags of a rank with one id each, of each table."""
    ids = [torch.arange(3) + 3 * rank + at for at in range(len(names)) for rank in ranks]
    lengths = torch.ones(len(ids) * 3, dtype=torch.int64)
    return KeyedJaggedTensor([f"of {name}" for name in names], torch.cat(ids), lengths=lengths)


def is_the_same(names: Sequence[str], cuts: dict[str, TableSharding]) -> None:
    whole, twin = bags(names), bags(names)
    parts = shard(twin, construct_plan(twin, cuts, 2))
    (whole(features(names, [0, 1])).values().square().sum() / 2).backward()
    parts(features(names, [dist.get_rank()])).values().square().sum().backward()
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=0, atol=0)
    parts.close()


def odd_names() -> None:
    for cut in (column_wise([0, 1]), column_wise([1, 1]), row_wise(), table_wise(1)):
        is_the_same(ODD, dict.fromkeys(ODD, cut))


def test_odd_names_of_tables() -> None:
    run(2, odd_names)


def like_a_shard() -> None:
    names = ["t", "t[0:4]"]
    for cut, other in (
        (column_wise([0, 1]), table_wise(0)),
        (column_wise([0, 1]), table_wise(1)),
        (column_wise([1, 0]), row_wise()),
        (column_wise([0, 0]), column_wise([0, 1])),
    ):
        twin = bags(names)
        with pytest.raises(ConfigError, match=r"columns of table 't' .* 't\[0:4\]' .* rename"):
            shard(twin, construct_plan(twin, {"t": cut, "t[0:4]": other}, 2))
    is_the_same(names, {"t": row_wise(), "t[0:4]": column_wise([0, 1])})
    is_the_same(names, {"t": column_wise([0, 1], [3, 5]), "t[0:4]": column_wise([0, 1])})


def test_a_table_called_like_the_shard_of_another() -> None:
    run(2, like_a_shard)


@pytest.mark.parametrize("bagged", [True, False])
def test_a_feature_called_like_the_output_of_another(bagged: bool) -> None:
    config: Any = EmbeddingBagConfig if bagged else EmbeddingConfig
    collection: Any = tierstore.EmbeddingBagCollection if bagged else tierstore.EmbeddingCollection
    tables = [
        config(20, 4, "t", feature_names=["f"]),
        config(20, 4, "u", feature_names=["f"]),
        config(20, 4, "v", feature_names=["f@t"]),
    ]
    with pytest.raises(ConfigError, match=r"two outputs would be called 'f@t'"):
        collection(tables)


class Odd(nn.Module):
    """Collections at paths that are folders, or parts of others."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({name: bags([f"table of {name}"]) for name in self.names})

    names = ("x", "x/rank00000", "tables", "/", "é")

    def forward(self, ranks: Sequence[int]) -> Tensor:
        outputs = [self.of[name](features([f"table of {name}"], ranks)).values() for name in self.names]
        return torch.cat(outputs, dim=1)


def odd_paths(path: str) -> None:
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path)
    expected: dict[str, Tensor] = {}
    for step in range(2):
        model = Odd()
        tables = [t for child in model.of.values() for t in child.embedding_bag_configs()]
        plan = construct_plan(tables, {table.name: row_wise() for table in tables}, 2)
        dmp = DistributedModelParallel(model, plan=plan, config=tiers)
        assert dmp.committed_extra().get("step", 0) == step
        if step:
            torch.testing.assert_close(dict(dmp.state_dict()), expected, rtol=0, atol=0)
        dmp([dist.get_rank()]).square().sum().backward()
        dmp.commit({"step": step + 1})
        expected = dict(dmp.state_dict())
        dmp.close()


def test_odd_paths_of_collections(tmp_path: Path) -> None:
    run(2, odd_paths, str(tmp_path))
    (generation,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    assert len(list(generation.iterdir())) == len(Odd.names)
    assert {child.name for folder in generation.iterdir() for child in folder.iterdir()} == {
        "rank00000",
        "rank00001",
    }


@pytest.mark.parametrize(
    ("sharded", "unsharded"),
    [
        (ShardedEmbeddingBagCollection, tierstore.EmbeddingBagCollection),
        (ShardedEmbeddingCollection, tierstore.EmbeddingCollection),
    ],
)
def test_sharded_collections_have_the_methods_of_unsharded_ones(sharded: type, unsharded: type) -> None:
    assert {name for name in dir(unsharded) if name[0] != "_"} <= {*dir(sharded)}
    assert issubclass(sharded, ShardedCollection)
    assert not issubclass(sharded, unsharded)
