"""Plans: what fits is placed whole, what does not is named, constraints hold, and the numbers add up."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import cache_policies
from tests.planner.collective import CONTEXT, plan_together
from tests.planner.machines import random_tables, table, topology
from tierstore import optim
from tierstore.cli.plan import read_yaml
from tierstore.errors import ConfigError, InfeasiblePlanError
from tierstore.placement import STORE_SLACK, ShardingPlan, ShardingType
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, Workload
from tierstore.planner.allocate import allocate
from tierstore.planner.costs import (
    POLICY_BYTES_PER_SLOT,
    POLICY_FIXED_BYTES,
    POLICY_FIXED_SLOTS,
    TIER_BYTES_PER_SLOT,
)
from tierstore.planner.files import specs_of_yaml
from tierstore.planner.options import Placed, options_of
from tierstore.planner.tables import STATE_FLOATS

EXAMPLE = Path(__file__).parents[2] / "examples/plan_100tb"


def planner(machines: Topology, **changes) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(machines, **{"batch_size": 256, "search_seconds": 0.15, **changes})


def test_the_constants_are_the_runtimes():
    from tierstore import _core

    assert pytest.approx(_core.Tier.BYTES_PER_SLOT) == TIER_BYTES_PER_SLOT
    assert cache_policies.get("lookahead").bytes_per_slot == POLICY_BYTES_PER_SLOT
    fixed = POLICY_FIXED_SLOTS * POLICY_FIXED_BYTES
    assert cache_policies.get("lookahead").fixed_bytes == pytest.approx(fixed, rel=0.01)
    for name, (per_column, per_row) in STATE_FLOATS.items():
        kind, _, mode = name.partition(":")
        spec = optim.specs.make(kind, **({"weight_decay_mode": mode} if mode else {}))
        for dim in (1, 7, 64):
            assert per_column * dim + per_row == spec.state_floats(dim)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_shards_cover_each_table_once_and_memories_are_not_exceeded(seed, hosts):
    machines = topology(hosts, 2, hbm_per_rank="512MiB", host_memory_per_host="1GiB")
    tables = random_tables(8, seed)
    plan = planner(machines, search_seconds=0.05).plan(tables)
    plan.check(tables, machines.world_size)
    for spec, placed in zip(tables, plan.tables, strict=True):
        assert placed.name == spec.name
        area = sum(shard.rows * shard.columns for shard in placed.shards)
        copies = machines.world_size if placed.sharding_type is ShardingType.DATA_PARALLEL else 1
        assert area == spec.num_embeddings * spec.embedding_dim * copies
        assert 0 <= placed.predicted_hit_rate <= 1
    for rank in range(machines.world_size):
        assert sum(shard.hbm_bytes for _, shard in plan.on_rank(rank)) <= machines.hbm_per_rank
    for host in range(hosts):
        shards = [s for rank in (2 * host, 2 * host + 1) for _, s in plan.on_rank(rank)]
        assert sum(shard.uvm_bytes for shard in shards) <= machines.host_memory_per_host
        assert sum(shard.ssd_bytes for shard in shards) <= machines.ssd_per_host
    places = [*plan.report["ranks"], *plan.report["hosts"]]
    longest = max(max(place["stage_seconds"].values()) for place in places)
    assert plan.report["predicted_step_s"] == pytest.approx(longest)


@pytest.mark.parametrize(("ssd", "factor"), [("40GB", 3.0), ("10GB", None), ("1TB", 3.0)])
def test_what_an_ssd_has_left_goes_to_its_stores_as_far_as_they_need_it(ssd, factor):
    machines = topology(1, 2, host_memory_per_host="2GiB", ssd_per_host=ssd)
    plan = planner(machines, search_seconds=0.05).plan([table("t", 20_000_000)])
    records = 20_000_000 * (4 * 64 + 16 + 16)
    given = sum(shard.ssd_bytes for shard in plan.table("t").shards)
    assert given == pytest.approx(factor * records if factor else 10e9 - 2 * STORE_SLACK, rel=1e-6)
    assert given == plan.report["hosts"][0]["ssd_bytes"] <= machines.ssd_per_host


def test_a_table_that_fits_in_hbm_takes_no_ssd_and_one_that_does_not_spills_down():
    plan = planner(topology()).plan([table("small", 10_000), table("large", 400_000_000)])
    small, large = plan.table("small"), plan.table("large")
    assert small.predicted_hit_rate == 1
    assert sum(shard.ssd_bytes for shard in small.shards) == 0
    assert sum(shard.ssd_bytes for shard in large.shards) > 400_000_000 * 272
    assert sum(shard.uvm_bytes for shard in large.shards) > 4 << 30
    assert plan.report["tables"][1]["tiers"] == ["hbm", "uvm", "ssd"]
    assert "ssd" in plan.report["tables"][1]["why"]


def test_more_memory_never_makes_the_plan_slower():
    tables = random_tables(3, 3, 6, 8)
    steps = [
        planner(topology(hbm_per_rank=size), search_seconds=60).plan(tables).report["predicted_step_s"]
        for size in ("256MiB", "2GiB", "64GiB")
    ]
    assert all(after <= before * 1.02 for before, after in pairwise(steps))


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({"ssd_per_host": "10GB"}, "ssd"),
        ({"ssd_per_host": 0}, "host_memory"),
        ({"host_memory_per_host": "512MiB"}, "host_memory"),
        ({"hbm_per_rank": "256KiB"}, "hbm"),
    ],
)
def test_what_does_not_fit_names_the_resource_and_how_much_is_missing(changes, binding):
    tables = [table(rows=400_000_000, pooling_factor=20)]
    machines = topology(1, 1, **changes)
    with pytest.raises(InfeasiblePlanError, match=binding) as caught:
        planner(machines).plan(tables)
    error = caught.value
    assert error.binding == binding
    assert error.missing_bytes > 0
    assert error.report["feasible"] is False
    resource = {"ssd": "ssd", "host_memory": "host memory", "hbm": "hbm"}[binding]
    assert re.search(rf"add [0-9.]+ \w+ of {resource} per (rank|host), or ", str(error))
    field = {"ssd": "ssd_per_host", "host_memory": "host_memory_per_host", "hbm": "hbm_per_rank"}[binding]
    enough = int(getattr(machines, field) + 1.05 * error.missing_bytes)
    planner(topology(1, 1, **{**changes, field: enough})).plan(tables)


def test_what_is_missing_is_exact_for_all_resources_together():
    tables = [table(rows=30_000_000, pooling_factor=20.0)]
    sizes = {"hbm_per_rank": 1 << 20, "host_memory_per_host": 1 << 28, "ssd_per_host": 1 << 30}
    with pytest.raises(InfeasiblePlanError) as caught:
        planner(topology(1, 1, **sizes), search_seconds=0.8).plan(tables)
    more = caught.value.report["to_add"]
    assert more.keys() == {"hbm_per_rank", "host_memory_per_host", "ssd_per_host"}
    enough = {name: size + more[name] for name, size in sizes.items()}
    assert not planner(topology(1, 1, **enough)).solve(tables).caches.missing
    for name in more:
        less = topology(1, 1, **{**enough, name: sizes[name] + int(0.9 * more[name])})
        assert planner(less).solve(tables).caches.missing


def test_what_fits_without_a_store_is_not_refused_for_the_stores_buffers():
    machines = topology(host_memory_per_host="1MiB")
    plan = planner(machines).plan([table("a", 10_000)])
    assert sum(shard.ssd_bytes for shard in plan.table("a").shards) == 0


def test_without_an_ssd_every_row_has_a_slot():
    machines = topology(2, 2, hbm_per_rank="40MiB", host_memory_per_host="1GiB", ssd_per_host=0)
    demands = {"a": ParameterConstraints(["row_wise"]), "b": ParameterConstraints(["column_wise"])}
    tables = [table("a", 1_601_443, 65), table("b", 300_007, 130)]
    for shard in [s for t in planner(machines, constraints=demands).plan(tables).tables for s in t.shards]:
        assert 0 < shard.hbm_rows < shard.rows
        assert shard.hbm_rows + shard.uvm_rows >= shard.rows


@pytest.mark.parametrize("held", range(1000, 1009))
def test_rows_that_are_in_hbm_alone_take_no_host_memory(held):
    # Rows become bytes and rows again, and a third of these numbers lose a row to rounding.
    problem = planner(topology(1, 1, hbm_per_rank=1, host_memory_per_host=1)).problem(
        [table(rows=300_000, dim=32)]
    )
    option = options_of(problem, 0)[0]
    cost = replace(option.cost, hbm_floor=float(held), memory_floor=0.0)
    caches = allocate(problem, [Placed(0, replace(option, cost=cost), [0])])
    assert caches.memory_rows >= caches.hbm_rows > 0


def test_shards_that_hbm_holds_whole_have_their_slots_to_themselves():
    tables = [table("small", 10_000), table("large", 400_000_000), table("copied", 100)]
    demand = {"copied": ParameterConstraints(["data_parallel"])}
    plan = planner(topology(), constraints=demand).plan(tables)
    own = {t.name: {shard.own for shard in t.shards} for t in plan.tables}
    assert own == {"small": {1}, "large": {0}, "copied": {1}}


def test_equal_shards_on_a_host_get_equal_memory():
    demands = {"t": ParameterConstraints(["row_wise"])}
    plan = planner(topology(1, 4), constraints=demands).plan([table(rows=400_000_000)])
    rows = [shard.uvm_rows for shard in plan.table("t").shards]
    assert max(rows) - min(rows) <= 1


def test_reasons_count_all_shards_that_share_a_hosts_drives():
    demands = {"t": ParameterConstraints(["row_wise"])}
    report = planner(topology(1, 4), constraints=demands).plan([table(rows=400_000_000)]).report
    why, ssd = report["tables"][0], report["hosts"][0]["stage_seconds"]["ssd"]
    # It is the only table, so all that the drives do is for its shards.
    assert -why["all_in_memory_ssd_s"] == pytest.approx(ssd)
    assert "all in memory: " in why["why"]


def test_advice_is_what_planning_again_gives():
    tables, machines = [table(rows=40_000_000, pooling_factor=20.0)], {"ssd_read_iops": 1e5}
    report = planner(topology(1, 1, **machines), search_seconds=20).plan(tables, advice_seconds=20).report
    assert report["helps_by_planning_again"]
    advice = {item["change"]: item["step_s"] for item in report["what_would_help"]}
    more = topology(1, 1, hbm_per_rank="2GiB", **machines)
    step = planner(more, search_seconds=20).plan(tables).report["predicted_step_s"]
    assert advice["+1 GiB HBM per rank"] == pytest.approx(step, rel=1e-3)
    assert all(item["step_s"] < report["predicted_step_s"] for item in report["what_would_help"])


@pytest.mark.parametrize("kind", [kind.value for kind in ShardingType])
def test_every_sharding_type_can_be_asked_for(kind):
    demand = {"t": ParameterConstraints(sharding_types=[kind])}
    plan = planner(topology(2, 2), constraints=demand, search_seconds=0.05).plan(
        [table(rows=10_001, dim=65), table("u")]
    )
    placed = plan.table("t")
    assert placed.sharding_type.value == kind
    cells = np.zeros((10_001, 65), np.int8)
    for s in placed.shards:
        cells[s.row_start : s.row_start + s.rows, s.column_start : s.column_start + s.columns] += 1
    assert (cells == (4 if kind == "data_parallel" else 1)).all()
    if kind in ("table_row_wise", "table_column_wise"):
        assert len({shard.rank // 2 for shard in placed.shards}) == 1


def test_constraints_hold():
    demands = {
        "a": ParameterConstraints(device_group=[1]),
        "b": ParameterConstraints(tiers=["hbm"]),
        "c": ParameterConstraints(min_hbm_bytes="100MiB"),
    }
    machines = topology(hbm_per_rank="600MiB")
    plan = planner(machines, constraints=demands).plan([table(name, 1_500_000) for name in "abcd"])
    assert {shard.rank for shard in plan.table("a").shards} == {1}
    assert plan.table("b").predicted_hit_rate == 1
    assert sum(shard.hbm_bytes for shard in plan.table("c").shards) >= 100 << 20


def test_plans_are_the_same_each_time_and_survive_json(tmp_path):
    tables = random_tables(3, 1)
    first, second = (planner(topology(), search_seconds=20).plan(tables) for _ in range(2))
    assert first == second
    first.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == first


def test_a_plan_for_another_model_or_world_size_is_refused():
    plan = planner(topology()).plan([table("a"), table("b")])
    with pytest.raises(ConfigError, match="2 ranks and there are 3"):
        plan.check([table("a"), table("b")], 3)
    with pytest.raises(ConfigError, match=r"no table .c. in the plan.*.b. of the plan is not in"):
        plan.check([table("a"), table("c")], 2)
    with pytest.raises(ConfigError, match="in the model and"):
        plan.check([table("a", 5), table("b")], 2)
    with pytest.raises(ConfigError, match='for device "cuda" and the tables are on "cpu"'):
        plan.check([table("a"), table("b")], 2, "cpu")
    with pytest.raises(ConfigError, match="not a sharding plan"):
        ShardingPlan.from_dict({"tables": [{"name": "a"}], "world_size": 1, "ranks_per_host": 1})


def test_modules_of_ours_and_of_torchrec_are_planned_alike():
    import torch
    import torchrec

    from tierstore import EmbeddingBagCollection, EmbeddingBagConfig

    class Model(torch.nn.Module):
        def __init__(self, collection):
            super().__init__()
            self.ebc, self.over = collection, torch.nn.Linear(10, 10)

    sizes = [("a", 1000, ["f", "g"]), ("b", 50, ["h"])]
    theirs = [
        torchrec.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=16, name=name, feature_names=features)
        for name, rows, features in sizes
    ]
    configs = [EmbeddingBagConfig(rows, 16, name, feature_names=features) for name, rows, features in sizes]
    adagrad = optim.RowWiseAdagrad(lr=0.1)  # torchrec's collections do not know their optimizer
    ours_model = Model(EmbeddingBagCollection(configs, optimizer=adagrad))
    ours = planner(topology(), search_seconds=60).plan(ours_model)
    their_model = Model(torchrec.EmbeddingBagCollection(tables=theirs))
    assert planner(topology(), search_seconds=60).plan(their_model) == ours
    assert list(ours.plan) == ["ebc"]
    assert list(ours.plan["ebc"]) == ["a", "b"]
    assert planner(topology(), search_seconds=60).collective_plan(ours_model) == ours


def test_all_ranks_get_one_plan_or_one_error(tmp_path):
    answers = CONTEXT.SimpleQueue()
    ranks = [
        CONTEXT.Process(target=plan_together, args=(rank, str(tmp_path / "meet"), answers)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    first, second = answers.get(), answers.get()
    assert first == second
    assert "ssd is short of" in first[1]


def plan_with(demands=None, stats=None, **changes):
    return planner(topology(), constraints=demands, stats=stats).plan([table(**changes)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: planner(topology()).plan([table("a"), table("a")]), "more than once"),
        (lambda: planner(topology()).plan([]), "no tables"),
        (lambda: planner(topology()).plan("tables"), "cannot plan a str"),
        (lambda: planner(topology()).plan([object()]), "no num_embeddings"),
        (lambda: plan_with({"x": ParameterConstraints()}), "unknown tables"),
        (lambda: plan_with(stats={"x": {}}), "stats name unknown"),
        (lambda: plan_with(stats={"t": {"sizes_rows": [1]}}), "stats of table 't'"),
        (lambda: plan_with({"t": ParameterConstraints(device_group=[7])}), "ranks below 2"),
        (lambda: plan_with({"t": ParameterConstraints(["row_wise"])}, rows=1), "allow no sharding type"),
        (lambda: ParameterConstraints(sharding_types=["diagonal"]), "must be some of"),
        (lambda: ParameterConstraints(tiers=["ssd"]), "tiers is"),
        (lambda: topology(hosts=0), "positive integer"),
        (lambda: topology(hbm_per_rank="many"), "hbm_per_rank"),
        (lambda: topology(ssd_read_iops=-1), "ssd_read_iops"),
        (lambda: topology(ssd_bw=0), "ssd_bw is 0; it must be a positive number"),
        (lambda: planner(topology(), batch_size=0), "batch_size"),
        (lambda: planner(topology(), search_seconds=float("nan")), "search_seconds"),
        (lambda: planner(topology(), constraints=[3]), "constraints is list"),
        (lambda: planner(topology(), stats="x"), "stats is str"),
        (lambda: EmbeddingShardingPlanner({"hosts": 1}), "must be a tierstore.planner.Topology"),
        (lambda: table(rows=0), "num_embeddings"),
        (lambda: table(rows=1 << 49), "at most 2\\^48"),
        (lambda: table(feature_names=("a", "a")), "a name twice"),
        (lambda: topology(hosts=10**6), "65536 at most"),
        (lambda: table(pooling_factor=float("nan")), "pooling_factor"),
        (lambda: table(optimizer="lion"), "unknown optimizer"),
    ],
)
def test_bad_input_says_what_is_wrong(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("name", "value"), [("dense_seconds", math.nan), ("depth", math.inf), ("depth", -1)])
def test_a_workload_has_finite_numbers(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*0 or more"):
        Workload(**{name: value})


def test_more_rows_than_a_store_has_places_for_are_not_called_feasible():
    """However large the SSD is; divided among more ranks the same rows fit."""
    wide = {"hbm_per_rank": "16GiB", "host_memory_per_host": "32TiB", "ssd_per_host": "1000TiB"}
    tables = [table("huge", 600_000_000_000, 16)]
    with pytest.raises(ConfigError, match="a store has places for"):
        planner(topology(1, 1, **wide)).plan(tables)
    assert planner(topology(1, 2, **wide)).plan(tables).tables


@pytest.mark.parametrize(("rows", "rank", "fits"), [(0, 0, True), (1, 0, False), (1, 1, True)])
def test_all_rows_of_a_size_on_a_rank_count_for_the_places_of_its_store(rows, rank, fits):
    """The search does not count places, so constraints say where tables go that no store holds together."""
    huge = {"hbm_per_rank": "16GiB", "host_memory_per_host": "32TiB", "ssd_per_host": "1000TiB"}
    demands = {name: ParameterConstraints(device_group=[at]) for name, at in (("a", 0), ("b", rank))}
    tables = [table("a", 15 << 34, 16), table("b", (15 << 34) + rows, 16)]
    two = planner(topology(1, 2, **huge), constraints=demands, search_seconds=0)
    if fits:
        assert {shard.rank for shard in two.plan(tables).table("b").shards} == {rank}
    else:
        with pytest.raises(ConfigError, match=r"a store has places for .*cut the tables by rows"):
            two.plan(tables)


def test_the_example_for_128_ranks_is_planned_in_no_time():
    machines = Topology.from_dict(read_yaml(EXAMPLE / "topology_128.yaml"))
    work = Workload(2048, depth=4)
    tables = specs_of_yaml(read_yaml(EXAMPLE / "tables.yaml"))
    assert EmbeddingShardingPlanner(machines, workload=work, search_seconds=0).plan(tables).tables
