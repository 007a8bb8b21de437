"""Unsharded models that ranks give must be the same: initial rows, rows changed before, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, EmbeddingBagConfig, TableOverride, TierConfig, optim
from tierstore.sharding import (
    DistributedModelParallel,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    shard,
    table_wise,
)
from tierstore.sharding.rows_digest import RowsDigest

CUTS = {"a": row_wise(), "b": table_wise(1), "c": data_parallel(), "d": column_wise([0, 1])}


def bags(tiers: TierConfig = cases.MEMORY, seed: int = 0, **options: Any) -> Any:
    """``options``: of table b."""
    configs = [EmbeddingBagConfig(50, 4, n, feature_names=[n], **(options if n == "b" else {})) for n in CUTS]
    return tierstore.EmbeddingBagCollection(configs, config=tiers, optimizer=optim.Adam(lr=0.1), seed=seed)


def of_config(override: TableOverride) -> Any:
    return bags(TierConfig(hbm="all", tables={"b": override}))


def changed(change: Callable[[Any], Any]) -> Any:
    made = bags()
    made.load_rows(torch.arange(9), torch.ones(9, 4), table="b")
    change(made)
    return made


def train(made: Any) -> None:
    features = tierstore.KeyedJaggedTensor(list(CUTS), torch.arange(8) % 7, lengths=torch.full((4,), 2))
    made(features).values().square().sum().backward()


def lower_rate(made: Any) -> None:
    made.fused_optimizer.param_groups[0]["lr"] = 0.05


def counted(made: Any) -> None:
    made.fused_optimizer.num_updates += 1


def hooked(made: Any) -> None:
    made.register_gradient_hook(lambda ids, gradients: 2 * gradients, "c")


def load(made: Any, ids: list[int], value: float, **state: float) -> None:
    parts = {name: torch.full((len(ids), 4), number) for name, number in state.items()}
    made.load_rows(torch.tensor(ids), torch.full((len(ids), 4), value), parts or None, "b")


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "init_fn": (lambda: bags(init_fn=torch.nn.init.ones_), "initial values"),
    "init_fn's argument": (lambda: bags(init_fn=partial(nn.init.constant_, val=0.5)), "initial values"),
    "bounds": (lambda: bags(weight_init_max=0.5), "initial values"),
    "seed": (lambda: bags(seed=1), "seed"),
    "seed of a table": (lambda: of_config(TableOverride(seed=1)), "initial values"),
    "init of a table": (lambda: of_config(TableOverride(init="zeros")), "initial values"),
    "a row loaded": (lambda: changed(lambda made: load(made, [20], 1.0)), "rows of table 'b'"),
    "another value": (lambda: changed(lambda made: load(made, [3], 1.0000001)), "rows of table 'b'"),
    "the sign of zero": (lambda: changed(lambda made: load(made, [3], -0.0)), "rows of table 'b'"),
    "the state": (
        lambda: changed(lambda made: load(made, [3], 1.0, exp_avg=0.0, exp_avg_sq=0.5)),
        "rows of table 'b'",
    ),
    "rows trained": (lambda: changed(train), "rows of table 'a', rows of table 'b'"),
    "learning rate": (lambda: changed(lower_rate), "optimizer state"),
    "updates": (lambda: changed(counted), "optimizer state"),
    "gradient hook": (lambda: changed(hooked), "gradient hooks"),
}


def different(path: str) -> None:
    rank = dist.get_rank()
    plan = construct_plan(bags(), CUTS, 2)
    for name, (other, what) in OTHERS.items():
        for path_of in (None, f"{path}/{list(OTHERS).index(name)}"):
            own = {0: lambda: changed(lambda made: None), 1: other}[rank]()
            tiers = TierConfig(hbm="24KiB", path=path_of) if path_of else None
            if "of a table" in name and path_of:
                continue  # the configuration given replaces it
            with pytest.raises(ConfigError, match=f"^rank 1 was given other .*{what}.* than rank 0"):
                shard(own, plan, config=tiers)
            own.rows([3], "b")  # still open
    model = nn.Sequential(bags(**({"init_fn": torch.nn.init.ones_} if rank else {})))
    with pytest.raises(ConfigError, match="rank 1 was given other initial values"):
        DistributedModelParallel(model, plan=plan)


def test_models_that_differ(tmp_path: Any) -> None:
    run(2, different, str(tmp_path))


def alike() -> None:
    rank = dist.get_rank()
    tight = TierConfig(hbm="8KiB", uvm="8KiB", ssd="64MiB", engine="memory")
    own, whole = (bags([cases.MEMORY, tight][rank]), bags())
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(rank))
    values = torch.randn(50, 4, generator=torch.Generator().manual_seed(5))
    for made in (own, whole):
        for part in ids.split(7):
            made.load_rows(part, values[part], table="b")
        made.load_rows([4], torch.full((1, 4), float("nan")), table="a")
    parts = shard(own, construct_plan(own, CUTS, 2))
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=0, atol=0, equal_nan=True)
    parts.close()
    first = TierConfig(hbm="all", tables={"a": TableOverride(seed=5)})
    own, whole = bags(first, seed=2), bags(first, seed=2)
    parts = shard(own, construct_plan(own, CUTS, 2))
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=0, atol=0)
    parts.close()


def offloaded() -> None:
    handle = tierstore.offload(nn.ModuleList([bags_of_torchrec(), nn.Embedding(9, 4)]), cases.MEMORY)
    plan = construct_plan(handle["0"], {"a": row_wise()}, 2)
    with pytest.raises(ConfigError, match="part of an offloaded model"):
        shard(handle["0"], plan)
    assert not handle["1"].engine.closed


def bags_of_torchrec() -> Any:
    import torchrec

    config = torchrec.EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="a", feature_names=["a"])
    return torchrec.EmbeddingBagCollection(tables=[config])


def test_collections_of_offloaded_models() -> None:
    run(2, offloaded)


def test_models_that_do_not_differ() -> None:
    run(2, alike)


@pytest.mark.filterwarnings("error")
def test_digests_tell_rows_apart() -> None:
    def digest(order: list[int], change: Callable[[torch.Tensor], Any] = lambda rows: None) -> Any:
        rows = torch.arange(24, dtype=torch.float32).reshape(6, 4)
        change(rows)
        found = RowsDigest()
        for part in torch.tensor(order).split(4):
            found.add(part, [rows[part], rows[part][:, 0]])
        return found.value

    def swap(rows: torch.Tensor) -> None:
        rows[[1, 2]] = rows[[2, 1]]

    def swap_columns(rows: torch.Tensor) -> None:
        rows[:, [2, 3]] = rows[:, [3, 2]]

    same = digest([0, 1, 2, 3, 4, 5])
    assert digest([5, 3, 1, 0, 2, 4]) == same
    others = [digest([0, 1, 2, 3, 4]), digest([0, 1, 2, 3, 4, 5], swap), digest(list(range(6)), swap_columns)]
    assert len({same, *others}) == 4
