"""Ids that are out of range, in sharded tables: as the plan says, or else the configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, InputError, KeyedJaggedTensor, optim
from tierstore.sharding import construct_plan, row_wise, shard, table_wise


def checked() -> None:
    rank = torch.distributed.get_rank()
    tables = [
        EmbeddingBagConfig(20, 4, "t", feature_names=["a"]),
        EmbeddingBagConfig(20, 4, "u", feature_names=["b"]),
    ]
    for planned, configured in ((None, "ignore"), ("ignore", "fatal"), ("fatal", "ignore")):
        tiers = replace(cases.TIGHT, bounds_check=configured)
        whole = tierstore.EmbeddingBagCollection(tables, config=cases.MEMORY, optimizer=optim.SGD(lr=0.1))
        plan = construct_plan(whole, {"t": row_wise(), "u": table_wise(1)}, 2)
        plan = replace(plan, tables=tuple(replace(table, bounds_check=planned) for table in plan.tables))
        with shard(whole, plan, config=tiers) as module:
            ids = torch.tensor([20 + rank, 3, -1, 5])
            batch = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(4, dtype=torch.int64))
            if planned == "fatal":
                with pytest.raises(InputError):
                    module(batch)
                continue
            found = module(batch)
            assert torch.equal(found["a"], module.rows([0, 3], "t"))
            assert torch.equal(found["b"], module.rows([0, 5], "u"))


def test_ids_out_of_range() -> None:
    run(2, checked)
