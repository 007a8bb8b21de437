"""The figure of a plan: tables stacked per tier and rank, stages with the binding one marked."""

from __future__ import annotations

import re
from typing import Any

import matplotlib
import numpy as np
import pytest

from tierstore.cli.plan_plot import drawn, stacks_of
from tierstore.errors import InfeasiblePlanError
from tierstore.planner import EmbeddingShardingPlanner, Topology
from tierstore.planner.files import specs_of_yaml


def report_of(hosts: int = 2, ssd: str = "40GB", rows: int = 20_000_000, tables: int = 12) -> dict[str, Any]:
    """The report of a plan of a large table and small ones, or of tables that do not fit."""
    topology = Topology(hosts, 4, "512MiB", "3GiB", ssd, device="cpu")
    names = [{"name": f"c{k}", "num_embeddings": 100_000 * k, "embedding_dim": 32} for k in range(1, tables)]
    specs = specs_of_yaml([{"name": "users", "num_embeddings": rows, "embedding_dim": 64}, *names])
    planner = EmbeddingShardingPlanner(topology, batch_size=1024, search_seconds=0.2)
    try:
        return dict(planner.plan(specs).report)
    except InfeasiblePlanError as error:
        return error.report


def texts(report: dict[str, Any]) -> list[str]:
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return re.findall(r"<text[^>]*>([^<]*)</text>", drawn(report, "svg").decode())


@pytest.mark.parametrize("tier", ["hbm", "uvm", "ssd"])
@pytest.mark.parametrize("tables", [3, 12])
def test_stacks_are_the_bytes_of_the_tables(tier: str, tables: int) -> None:
    report = report_of(tables=tables)
    stacks = stacks_of(report, tier)
    assert next(iter(stacks)) == "users"
    assert len(stacks) == min(tables, 10) + 1
    users = np.zeros(8)
    for shard in report["tables"][0]["shards"]:
        users[shard["rank"]] += shard[f"{tier}_bytes"]
    assert np.array_equal(stacks["users"], users)
    of_tables = sum(sizes.sum() for name, sizes in stacks.items() if name != "beside tables")
    assert of_tables == sum(s[f"{tier}_bytes"] for table in report["tables"] for s in table["shards"])
    places, memory = (report["ranks"], "hbm") if tier == "hbm" else (report["hosts"], "host_memory")
    memory = "ssd" if tier == "ssd" else memory
    used = sum(place[f"{memory}_bytes"] for place in places)
    assert sum(sizes.sum() for sizes in stacks.values()) == pytest.approx(used, rel=0.01)


def test_the_binding_stage_is_marked() -> None:
    report = report_of()
    (marked,) = (text for text in texts(report) if "sets the step" in text)
    stage, place = re.match(r"(.*) of (.*) sets the step", marked).groups()  # type: ignore[union-attr]
    assert stage.replace(" ", "_") == report["binding"]
    kind, number = place.split()
    seconds = report[f"{kind}s"][int(number)]["stage_seconds"][report["binding"]]
    assert marked.endswith(f": {1e3 * seconds:.3g} ms")
    assert seconds == max(one["stage_seconds"][report["binding"]] for one in report[f"{kind}s"])


def test_tables_and_tiers_are_named() -> None:
    found = texts(report_of())
    assert {"users", "c11", "3 others", "beside tables", "rank 0", "host 1", "hbm, 100% full"} <= set(found)
    assert "c1" not in found
    assert "nothing is here" not in found
    assert "nothing is here" in texts(report_of(ssd="0", rows=1000))


@pytest.mark.filterwarnings("error")
def test_any_name_of_a_table_is_drawn() -> None:
    report = report_of()
    names = ["_hidden", "of_$b_{", "$x^$", f"{'long_' * 20}end", "表"]
    for table, name in zip(reversed(report["tables"]), names, strict=False):
        table["name"] = name
    found = {text.strip() for text in texts(report)}
    assert {*names[:3], "long_long_long_…ng_long_long_end"} <= found


def test_tables_are_not_mistaken_for_what_is_beside_them() -> None:
    report = report_of()
    report["tables"][0]["name"], report["tables"][-1]["name"] = "beside tables", "3 others"
    expected = [sizes.tolist() for sizes in stacks_of(report_of(), "ssd").values()]
    stacks = stacks_of(report, "ssd")
    assert [sizes.tolist() for sizes in stacks.values()] == expected
    assert [*stacks][:2] == ["beside tables", "3 others"]
    assert [name.strip() for name in stacks][-2:] == ["3 others", "beside tables"]


def test_the_axis_of_a_single_rank_has_whole_numbers() -> None:
    topology = Topology(1, 1, "1MiB", "3GiB", "40GB", device="cpu")
    specs = specs_of_yaml([{"name": "users", "num_embeddings": 100_000, "embedding_dim": 64}])
    report = EmbeddingShardingPlanner(topology, batch_size=64, search_seconds=0.1).plan(specs).report
    assert not [text for text in texts(dict(report)) if text.startswith("−")]


def test_of_many_ranks_the_slowest_are_drawn() -> None:
    found = texts(report_of(hosts=8))
    assert len([text for text in found if re.fullmatch(r"rank \d+", text)]) == 8
    assert len([text for text in found if re.fullmatch(r"host \d+", text)]) <= 4
    assert "predicted stages of the slowest ranks and hosts" in found


def test_what_does_not_fit_is_drawn_without_a_mark() -> None:
    report = report_of(ssd="1GB", rows=2_000_000_000)
    assert not report["feasible"]
    assert not [text for text in texts(report) if "sets the step" in text]
