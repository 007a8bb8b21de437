"""The smallest tiered module, and random input for it: what tests of tiers and pipeline train."""

from __future__ import annotations

import numpy as np
import torch

from tierstore import TierConfig, _core, optim
from tierstore.cache.engine import Engine, Table
from tierstore.cache.layout import IdSegment
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.initializers import uniform
from tierstore.modules.base import TieredModule
from tierstore.modules.parts import Lookup, PooledPart

ROWS = 2000


class Bags(TieredModule):
    """The smallest module: sum pooling over fixed-size bags of every table, one feature per table."""

    def lookup_inputs(self, ids: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(ids)

    def make_lookup(self, ids: list[torch.Tensor]) -> Lookup:
        bags = ids[0].shape[0]
        parts, column = [], 0
        columns = []
        for table in self.engine.tables:
            columns.append(column)
            column += table.embedding_dim
        for group in self.engine.groups:
            members = [i for i in range(len(ids)) if self.engine.group_of(i) is group]
            segments = [
                IdSegment(
                    f"f{i}", ids[i].data_ptr(), ids[i].numel(), False, i, self.engine.tables[i].num_embeddings
                )
                for i in members
            ]
            counts = np.concatenate([np.full(bags, ids[i].shape[1]) for i in members])
            own = _core.Bags(
                offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                bag_start=np.arange(len(members) + 1, dtype=np.int64) * bags,
                out_offset=np.array([columns[i] for i in members], np.int64),
                out_stride=np.full(len(members), column, np.int64),
                modes=np.zeros(len(members), np.uint8),
            )
            parts.append(PooledPart(group, group.batch(segments), [], bags=own))
        return Lookup(parts, (bags, column))

    def forward(self, ids: list[torch.Tensor]) -> torch.Tensor:
        return self.pooled_rows(self.find_lookup(ids), None)


def build(config: TierConfig, optimizer: optim.OptimizerSpec, dims: tuple[int, ...]) -> Bags:
    tables = [Table(f"t{i}", ROWS, dim, uniform(-0.5, 0.5)) for i, dim in enumerate(dims)]
    engine = Engine(tables, config, optimizer, seed=3)
    return Bags(engine, range(len(tables)), optimizer)


def train(module: Bags, batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    outputs = []
    for ids in batches:
        out = module(ids)
        (out.sin() * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        outputs.append(out.detach().clone())
    return outputs


def everything(module: Bags) -> list[torch.Tensor]:
    ids = torch.arange(ROWS)
    found = []
    for table in module.engine.tables:
        found.append(module.rows(ids, table.name))
        found += module.optimizer_rows(ids, table.name).values()
    return found


def random_batches(seed: int, count: int, tables: int, bags: int, hot: int) -> list[list[torch.Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        [torch.from_numpy((rng.zipf(1.2, (bags, hot)) * (7 + t)) % ROWS) for t in range(tables)]
        for _ in range(count)
    ]


SGD = optim.SGD(lr=0.1)


def budget(slots: int, optimizer: optim.OptimizerSpec = SGD, dim: int = 5, policy: str = "lookahead") -> int:
    """Bytes of a memory tier of ``slots`` rows."""
    return bytes_for(slots, optimizer.row_bytes(dim), policy)
