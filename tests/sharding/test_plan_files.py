"""Plan files that were changed by hand: every wrong value is named by its path."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore import ConfigError, EmbeddingBagConfig
from tierstore.placement import ShardingPlan, ShardingType
from tierstore.sharding import (
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tierstore.sharding.routing import check_placement_of

CUTS = {
    "data_parallel": data_parallel(),
    "table_wise": table_wise(1),
    "row_wise": row_wise(),
    "column_wise": column_wise([0, 1, 3]),
    "table_row_wise": table_row_wise(1),
    "table_column_wise": table_column_wise(0),
    "grid_shard": grid_shard([1, 0]),
}
TABLES = [EmbeddingBagConfig(20, 12, name) for name in CUTS]
WORLD, PER_HOST = 4, 2


def valid() -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(json.dumps(construct_plan(TABLES, CUTS, WORLD, PER_HOST).to_dict()))
    return plan


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from leaves(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def as_text(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


OF_NUMBERS = ["1", "", 1.0, 1.5, True, False, None, [], {}, [1], -1, 1 << 63, float("nan"), float("inf")]
OF_RATES = ["0.5", True, False, None, [], {}, -0.1, 1.1, float("nan"), float("inf"), -float("inf")]
OF_TEXTS: list[Any] = [1, 1.0, True, None, [], {}, ["x"]]
OF_CHOICES: list[Any] = [0, 1, 1.0, "true", "", [], {}]
OF_LISTS: list[Any] = [{}, {"0": {}}, "x", 5, None, True, []]
OF_OBJECTS: list[Any] = [[], "x", 5, None, True]


def wrong_values(path: tuple[Any, ...], value: Any) -> list[Any]:
    if isinstance(value, dict):
        return OF_OBJECTS
    if isinstance(value, list):
        return OF_LISTS
    if value is None:
        return OF_CHOICES
    if isinstance(value, int):
        others = {"world_size": [0], "ranks_per_host": [0], "own": [2]}
        return OF_NUMBERS + others.get(path[-1], [])
    if isinstance(value, float):
        return OF_RATES
    more = {"sharding_type": ["", "rows", "TABLE_WISE"], "device": ["tpu", "CPU"], "name": [""]}
    return OF_TEXTS + more.get(path[-1], [])


def test_every_wrong_value_is_named_by_its_path() -> None:
    plan, tried = valid(), 0
    assert ShardingPlan.from_dict(plan) == construct_plan(TABLES, CUTS, WORLD, PER_HOST)
    for path in list(leaves(plan)):
        for wrong in wrong_values(path, at(plan, path)):
            holder, right = at(plan, path[:-1]), at(plan, path)
            holder[path[-1]] = wrong
            with pytest.raises(ConfigError, match=rf"^not a sharding plan: {re.escape(as_text(path))} is "):
                ShardingPlan.from_dict(plan)
            holder[path[-1]] = right
            tried += 1
    assert tried > 1000


OPTIONAL = {
    "device",
    "predicted_hit_rate",
    "module",
    "num_embeddings",
    "embedding_dim",
    "hbm_rows",
    "uvm_rows",
    "stochastic_rounding",
    "bounds_check",
    "own",
    "read_ahead_bytes",
}


def test_what_is_missing_or_unknown_is_named() -> None:
    plan = valid()
    for path in leaves(plan):
        if isinstance(path[-1], int):
            continue
        changed = copy.deepcopy(plan)
        del at(changed, path[:-1])[path[-1]]
        if path[-1] in OPTIONAL:
            ShardingPlan.from_dict(changed)
            continue
        with pytest.raises(
            ConfigError, match=rf"^not a sharding plan: {re.escape(as_text(path))} is missing"
        ):
            ShardingPlan.from_dict(changed)
    shard = plan["tables"][1]["shards"][0]
    shard["hbm_row"] = 3
    with pytest.raises(ConfigError, match=r"tables\[1\].shards\[0\].hbm_row is unknown; use rank, row_start"):
        ShardingPlan.from_dict(plan)
    for other in ([], None, "plan", 5):
        with pytest.raises(ConfigError, match="not a sharding plan: it is"):
            ShardingPlan.from_dict(other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks_per_host is 3; it must divide world_size, which is 4"):
        ShardingPlan.from_dict({**valid(), "ranks_per_host": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"world_size": 1, "world_size": 2}', "an object has 'world_size' more than once"),
        ('{"world_size": 1', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not a sharding plan: it is"),
        ('{"world_size": NaN}', "world_size is nan; it must be a whole number"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ShardingPlan.load(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="is not JSON"):
        ShardingPlan.load(file)


def check(plan: ShardingPlan) -> None:
    plan.check(TABLES, WORLD)
    for table in plan.tables:
        check_placement_of(table, plan.world_size, plan.ranks_per_host)


def test_shards_must_be_those_of_the_sharding_type() -> None:
    """Every table's shards under every type: accepted only if the type describes them."""
    plan = construct_plan(TABLES, CUTS, WORLD, PER_HOST)
    check(plan)
    fits = {
        "data_parallel": {"data_parallel"},
        "table_wise": {"table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"},
        "row_wise": {"row_wise"},
        "column_wise": {"column_wise"},
        "table_row_wise": {"table_row_wise", "row_wise"},
        "table_column_wise": {"table_column_wise", "column_wise"},
        "grid_shard": set(),
    }
    for table in plan.tables:
        for kind in ShardingType:
            if kind is ShardingType.GRID_SHARD:
                continue  # any rectangles
            changed = replace(table, sharding_type=kind)
            if kind.value in fits[table.name]:
                check_placement_of(changed, WORLD, PER_HOST)
                continue
            with pytest.raises(
                ConfigError, match=rf"plan of table '{table.name}' \({kind}\): .*make the plan"
            ):
                check_placement_of(changed, WORLD, PER_HOST)
    halves = plan.tables[1].shards[0]
    two = tuple(replace(halves, rank=r, row_start=10 * r, rows=10) for r in range(2))
    with pytest.raises(ConfigError, match=r"'table_wise' \(table_wise\): its shards must have all rows"):
        check_placement_of(replace(plan.tables[1], shards=two), WORLD, PER_HOST)


def test_numbers_that_are_changed_by_one_are_noticed() -> None:
    """Where the rectangles are: any other place leaves a gap or covers something twice."""
    plan = valid()
    for path in leaves(plan):
        if path[-1] not in (
            "row_start",
            "rows",
            "column_start",
            "columns",
            "num_embeddings",
            "embedding_dim",
        ):
            continue
        for by in (1, -1):
            changed = copy.deepcopy(plan)
            at(changed, path[:-1])[path[-1]] += by
            if at(changed, path) < 0:
                continue
            with pytest.raises(ConfigError, match=plan["tables"][path[1]]["name"]):
                check(ShardingPlan.from_dict(changed))


@pytest.mark.parametrize("value", ["1", 1.0, True, None, -1, math.nan])
def test_shards_made_in_python(value: Any) -> None:
    plan = construct_plan(TABLES, CUTS, WORLD, PER_HOST)
    shard = plan.tables[1].shards[0]
    for name in vars(shard):
        wrong = replace(plan.tables[1], shards=(replace(shard, **{name: value}),))
        with pytest.raises(ConfigError, match=f"{name} of a shard is {value!r} and not a whole number"):
            check_placement_of(wrong, WORLD, PER_HOST)
    wrong = replace(plan.tables[1], shards=(replace(shard, own=2),))
    with pytest.raises(ConfigError, match="own of a shard is 2 and not 0 or 1"):
        check_placement_of(wrong, WORLD, PER_HOST)
    fine = replace(plan.tables[1], shards=(replace(shard, rank=np.int64(1)),))
    check_placement_of(fine, WORLD, PER_HOST)


def test_a_plan_is_printed_with_a_line_per_table() -> None:
    """Scripts of torchrec print their plan, and ask it for the tables of a module."""
    tables = [EmbeddingBagConfig(20, 12, "users"), EmbeddingBagConfig(8, 4, "days")]
    plan = construct_plan(tables, {"users": row_wise(), "days": table_wise(1)}, 2)
    users = replace(plan.tables[0], module="model.ebc")
    shards = tuple(replace(shard, hbm_bytes=1000, ssd_bytes=2**20) for shard in users.shards)
    plan = replace(plan, tables=(replace(users, shards=shards), plan.tables[1]))
    assert str(plan).splitlines() == [
        "plan of 2 ranks",
        "model.ebc.users: row_wise on 0, 1; hbm 2,000 bytes, ssd 2,097,152 bytes",
        "days: table_wise on 1; bytes of the configuration",
    ]
    assert plan.get_plan_for_module("model.ebc") == {"users": plan.tables[0]}
    assert plan.get_plan_for_module("other") is None
