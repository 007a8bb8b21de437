"""Invariant 1: whatever the budget, policy, depth, window, engine or thread count, outputs and final rows
(weights and
optimizer state) equal, bit for bit, those of the same kernels with every row in memory; also across commit,
close
and reopen in the middle of training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tierstore import TierConfig, optim
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.modules.configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tierstore.sparse import KeyedJaggedTensor

OPTIMIZERS = (
    optim.SGD(lr=0.1, weight_decay=0.01),
    optim.RowWiseAdagrad(lr=0.1),
    optim.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    optim.Adam(lr=0.05),
    optim.SGD(lr=0.1, momentum=0.9),
    optim.LarsSGD(lr=10.0, weight_decay=0.01),
    optim.PartialRowWiseAdam(lr=0.05),
    optim.LAMB(lr=0.05, weight_decay=0.01),
    optim.PartialRowWiseLAMB(lr=0.05),
    optim.Adagrad(
        lr=0.1, initial_accumulator_value=0.1, weight_decay=0.1, weight_decay_mode="decoupled_global"
    ),
)
DTYPES = (DataType.FP32, DataType.FP16, DataType.BF16)


@dataclass(frozen=True)
class Case:
    """One random model and its batches."""

    seed: int
    dims: tuple[int, ...]
    rows: int
    pooling: tuple[PoolingType, ...]
    weighted: bool
    optimizers: tuple[optim.OptimizerSpec, ...]
    """Of each table, or one of all."""
    dtypes: tuple[DataType, ...]

    def names(self) -> list[str]:
        return [f"t{i}" for i in range(len(self.dims))]

    def optimizer(self) -> Any:
        if len(self.optimizers) == 1:
            return self.optimizers[0]
        return dict(zip(self.names(), self.optimizers, strict=True))

    def build(self, config: TierConfig) -> torch.nn.ModuleDict:
        bags = [
            EmbeddingBagConfig(
                num_embeddings=self.rows,
                embedding_dim=dim,
                name=name,
                data_type=dtype,
                feature_names=[name],
                pooling=pooling,
            )
            for name, dim, dtype, pooling in zip(
                self.names(), self.dims, self.dtypes, self.pooling, strict=True
            )
        ]
        plain = [
            EmbeddingConfig(self.rows, dim, name, dtype, [name])
            for name, dim, dtype in zip(self.names(), self.dims, self.dtypes, strict=True)
        ]
        path = config.path
        configs = [
            config if path is None else TierConfig(**{**vars(config), "path": f"{path}/{part}"})
            for part in ("bags", "plain")
        ]
        return torch.nn.ModuleDict(
            {
                "bags": tierstore.EmbeddingBagCollection(
                    bags, self.weighted, config=configs[0], optimizer=self.optimizer(), seed=self.seed
                ),
                "plain": tierstore.EmbeddingCollection(
                    plain, config=configs[1], optimizer=self.optimizer(), seed=self.seed
                ),
            }
        )

    def batches(self, count: int) -> list[KeyedJaggedTensor]:
        rng = np.random.default_rng(self.seed)
        made = []
        for _ in range(count):
            size = int(rng.integers(0, 8))
            lengths = rng.integers(0, 4, size * len(self.dims))
            ids = (rng.zipf(1.2, int(lengths.sum())) * 11) % self.rows
            weights = torch.from_numpy(rng.random(len(ids), np.float32)) if self.weighted else None
            made.append(
                KeyedJaggedTensor(
                    keys=self.names(),
                    values=torch.from_numpy(ids),
                    lengths=torch.from_numpy(lengths),
                    weights=weights,
                )
            )
        return made


def step(model: torch.nn.ModuleDict, batch: KeyedJaggedTensor) -> list[torch.Tensor]:
    pooled = model["bags"](batch).values()
    sequences = [jagged.values() for jagged in model["plain"](batch).values()]
    loss = (pooled.sin() * torch.arange(pooled.numel()).view_as(pooled).cos()).sum()
    loss = loss + sum((s.cos().sum() for s in sequences), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    return [pooled.detach().clone(), *(s.detach().clone() for s in sequences)]


def everything(model: torch.nn.ModuleDict, case: Case) -> Iterator[torch.Tensor]:
    ids = torch.arange(case.rows)
    for module in model.values():
        for name in case.names():
            yield module.rows(ids, name)
            yield from module.optimizer_rows(ids, name).values()


def close(model: torch.nn.ModuleDict) -> None:
    for module in model.values():
        module.close()


def train(
    case: Case, config: TierConfig, reopen_at: int | None, ahead: dict[str, Any] | None
) -> list[torch.Tensor]:
    batches = case.batches(10)
    model = case.build(config)
    outputs: list[torch.Tensor] = []
    parts = [batches] if reopen_at is None else [batches[:reopen_at], batches[reopen_at:]]
    for index, part in enumerate(parts):
        if index:
            close(model)
            model = case.build(config)
        for batch in part if ahead is None else tierstore.prefetch(part, model, **ahead):
            outputs += step(model, batch)
    outputs += everything(model, case)
    close(model)
    return outputs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tables = draw(st.integers(1, 3))
    weighted = draw(st.booleans())
    kinds = [PoolingType.SUM, PoolingType.MEAN] + ([] if weighted else [PoolingType.MAX])
    return Case(
        seed=draw(st.integers(0, 10**6)),
        dims=tuple(draw(st.lists(st.integers(1, 20), min_size=tables, max_size=tables))),
        rows=draw(st.sampled_from([1, 50, 997])),
        pooling=tuple(draw(st.lists(st.sampled_from(kinds), min_size=tables, max_size=tables))),
        weighted=weighted,
        optimizers=tuple(
            draw(st.sampled_from(OPTIMIZERS)) for _ in range(tables if draw(st.booleans()) else 1)
        ),
        dtypes=tuple(draw(st.lists(st.sampled_from(DTYPES), min_size=tables, max_size=tables))),
    )


def budget(case: Case, slots: int, policy: str) -> int:
    """Bytes for at least about ``slots`` float32 rows of every row layout."""
    optimizers = case.optimizers * (len(case.dims) // len(case.optimizers))
    pairs = zip(case.dims, optimizers, strict=True)
    return sum(bytes_for(slots, optimizer.row_bytes(dim), policy) for dim, optimizer in pairs)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=cases(),
    engine=st.sampled_from(["native", "native", "rocksdb", "lmdb", "memory"]),
    policy=st.sampled_from(["lru", "lfu", "lookahead"]),
    slots=st.integers(16, 300),
    uvm=st.sampled_from([0, 0, 20]),
    reopen=st.sampled_from([None, 4]),
    ahead=st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {
                "depth": st.one_of(st.integers(0, 8), st.just("auto")),
                "window": st.sampled_from([0, 1, 5, "auto"]),
            }
        ),
    ),
    threads=st.integers(1, 3),
    rounding=st.sampled_from([None, True, False]),
)
def test_tiers_equal_memory(
    case: Case,
    engine: str,
    policy: str,
    slots: int,
    uvm: int,
    reopen: int | None,
    ahead: dict[str, Any] | None,
    threads: int,
    rounding: bool | None,
) -> None:
    tierstore.set_num_threads(1)
    want = train(case, TierConfig(hbm="all", stochastic_rounding=rounding), None, None)
    tierstore.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        config = TierConfig(
            hbm=budget(case, slots, policy),
            uvm=budget(case, uvm, policy) if uvm else 0,
            ssd="1GiB",
            path=folder if engine != "memory" else None,
            engine=engine,
            policy=policy,
            stochastic_rounding=rounding,
        )
        got = train(case, config, reopen if engine != "memory" else None, ahead)
    tierstore.set_num_threads(2)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb"])
def test_a_table_of_10_to_the_12_rows(engine: str, tmp_path: Any) -> None:
    config = TierConfig(hbm="1MiB", path=tmp_path / "store", engine=engine)
    table = EmbeddingBagConfig(num_embeddings=10**12, embedding_dim=64, name="t", feature_names=["f"])
    with tierstore.EmbeddingBagCollection(
        [table], config=config, optimizer=optim.RowWiseAdagrad(lr=0.1)
    ) as bags:
        rng = np.random.default_rng(0)
        for _ in range(10):
            ids = torch.from_numpy(rng.integers(0, 10**12, 2000))
            batch = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.full((500,), 4))
            out = bags(batch).values()
            (out**2).sum().backward()
        assert out.shape == (500, 64)
        assert sum(len(ids) for ids in bags.touched_ids()) == 20_000
        assert bags.stats()["evicted_rows"] > 10_000
