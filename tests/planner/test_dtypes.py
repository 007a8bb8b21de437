"""Plans count the bytes that rows take in each tier, by the table's dtype and by those of the tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tierstore
from tests.planner.machines import table, topology
from tierstore import TierConfig, optim
from tierstore.errors import ConfigError
from tierstore.modules.configs import DataType, EmbeddingBagConfig
from tierstore.planner import EmbeddingShardingPlanner, Workload
from tierstore.planner.costs import DISK_SLACK, slot_bytes
from tierstore.planner.options import options_of
from tierstore.planner.planner import tables_of_module
from tierstore.rounds import record_bytes
from tierstore.row_format import RowFormat

ROWS, DIM = 1 << 20, 64
SHORT = TierConfig(ssd="1GiB", uvm="1MiB", ssd_dtype="int8", uvm_dtype="int8", state_dtype="bf16")
SIZES = [
    ("fp32", None, (272, 272, 272)),
    ("bf16", None, (144, 144, 144)),
    ("fp16", None, (144, 144, 144)),
    ("fp32", SHORT, (272, 80, 80)),
    ("fp32", replace(SHORT, uvm_dtype="fp32"), (272, 272, 80)),
    ("bf16", TierConfig(ssd_dtype="bf16"), (144, 144, 144)),
]


@pytest.mark.parametrize(("dtype", "tiers", "sizes"), SIZES)
def test_every_tier_has_its_own_bytes(dtype: str, tiers: TierConfig | None, sizes: tuple[int, ...]) -> None:
    hbm, uvm, ssd = sizes
    spec = table("t", ROWS, DIM, dtype=dtype)
    planner = EmbeddingShardingPlanner(topology(ranks_per_host=1), workload=Workload(tiers=tiers))
    problem = planner.problem([spec])
    (cost, *_) = [one.cost for one in options_of(problem, 0) if one.shards == 1 and one.cost.slot_bytes]
    assert (cost.slot_bytes, cost.host_slot_bytes) == (slot_bytes(hbm), slot_bytes(uvm))
    assert cost.stored_bytes == ssd
    assert cost.ssd_bytes == int(ROWS * record_bytes(ssd) * DISK_SLACK)


def planned(tiers: TierConfig | None, host: int, **more: Any) -> tuple[Any, Any]:
    machine = topology(
        ranks_per_host=1, hbm_per_rank="32MiB", host_memory_per_host=host, device="cpu", **more
    )
    planner = EmbeddingShardingPlanner(machine, workload=Workload(tiers=tiers), search_seconds=0.1)
    plan = planner.plan([table("t", ROWS, DIM)])
    return plan, plan.tables[0].shards[0]


def test_fewer_bytes_hold_more_rows_and_take_less_of_the_ssd() -> None:
    wide, narrow = (planned(tiers, 128 << 20) for tiers in (None, SHORT))
    assert narrow[1].hbm_rows == pytest.approx(wide[1].hbm_rows, rel=0.01)
    assert narrow[1].uvm_rows > 1.8 * wide[1].uvm_rows
    assert narrow[1].ssd_bytes < 0.4 * wide[1].ssd_bytes
    assert narrow[0].report["predicted_step_s"] < wide[0].report["predicted_step_s"]


def test_a_host_that_holds_narrow_rows_only() -> None:
    """The bytes that float32 rows would take are not there; those of int8 rows are."""
    each = slot_bytes(80) * ROWS + (140 << 20)
    _, shard = planned(SHORT, int(each))
    assert shard.hbm_rows + shard.uvm_rows == ROWS
    assert not shard.ssd_bytes
    assert planned(None, int(each))[1].ssd_bytes


@pytest.mark.parametrize("kind", [DataType.BF16, DataType.FP16])
def test_collections_say_their_dtypes(kind: DataType) -> None:
    tables = [EmbeddingBagConfig(ROWS, DIM, "t", kind), EmbeddingBagConfig(ROWS, DIM, "u")]
    config = TierConfig(hbm="1MiB", engine="memory", ssd_dtype=str(kind).lower())
    with tierstore.EmbeddingBagCollection(tables, config=config, optimizer=optim.Adam(lr=0.1)) as bags:
        specs, _ = tables_of_module(bags)
        want = RowFormat(str(kind).lower()).row_bytes(DIM, 2 * DIM)
        assert [spec.row_bytes(tier) for spec in specs for tier in ("hbm", "uvm", "ssd")] == [
            *(want, want, want),
            *(768, 768, want),
        ]
        for spec, group in zip(specs, bags.engine.groups, strict=True):
            assert spec.row_bytes() == group.layout.row_bytes
            assert spec.row_bytes("ssd") == group.layout.stored_bytes


def test_dtypes_that_no_table_has() -> None:
    with pytest.raises(
        ConfigError, match=r"'t': dtype is 'int8'; it must be one of \('fp32', 'fp16', 'bf16'"
    ):
        table("t", ROWS, DIM, dtype="int8")
    with pytest.raises(ConfigError, match=r"'t': data_type is .*INT8.*; use FP32, FP16 or BF16"):
        EmbeddingShardingPlanner(topology()).plan([_Torchrecs()])


class _Torchrecs:
    name, num_embeddings, embedding_dim, data_type = "t", ROWS, DIM, "INT8"
