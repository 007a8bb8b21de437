"""``tierstore plan``: its files, its JSON, its exit codes."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest
import yaml

from tests.small_training import small_data
from tierstore.cli.main import main
from tierstore.data import load
from tierstore.planner.files import specs_of_yaml
from tierstore.trace import describe, open_trace

__all__ = ["small_data"]

TABLES = [
    {"name": "users", "num_embeddings": 200_000_000, "embedding_dim": 64, "pooling_factor": 2.0},
    {"name": "items", "num_embeddings": "1e6", "embedding_dim": 32, "feature_names": ["i", "j"]},
    {"name": "days", "num_embeddings": 7, "embedding_dim": 32, "popularity": {"s": 0.5, "q": 0}},
]
TOPOLOGY = {
    "hosts": 1,
    "ranks_per_host": 2,
    "hbm_per_rank": "2GiB",
    "host_memory_per_host": "16GiB",
    "ssd_per_host": "1TB",
    "ssd_read_iops": "1e5",
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(TABLES))
    (tmp_path / "topology.yaml").write_text(yaml.safe_dump(TOPOLOGY))
    return tmp_path


def plan(files, *arguments: str) -> int:
    command = ["plan", "--tables", f"{files}/tables.yaml", "--topology", f"{files}/topology.yaml"]
    return main([*command, "--search-seconds", "0.1", *arguments])


def test_the_json_has_the_promised_keys(files, capsys):
    assert (
        plan(files, "--json", f"{files}/out.json", "--plot", f"{files}/out.png", "--batch-size", "1000") == 0
    )
    report = json.loads((files / "out.json").read_text())
    promised = {"feasible", "binding", "plan_seconds", "predicted_step_s", "tables", "ranks", "hosts"}
    assert promised <= report.keys()
    assert report["feasible"] is True
    assert [table["name"] for table in report["tables"]] == ["users", "items", "days"]
    for table in report["tables"]:
        assert {"sharding_type", "shards", "predicted_hit_rate"} <= table.keys()
        for shard in table["shards"]:
            assert {"rank", "hbm_bytes", "uvm_bytes", "ssd_bytes"} <= shard.keys()
    assert len(report["ranks"]) == 2
    assert len(report["hosts"]) == 1
    assert (files / "out.png").stat().st_size > 10_000
    text = capsys.readouterr().out
    assert "what would help most" in text
    assert "assumed, not measured" in text


DATA = ["--data", "synthetic:zipf:1.05", "--rows", "5000", "--tables", "3", "--dim", "8", "--steps", "20"]
SMALL = {"ranks_per_host": 1, "device": "cpu", "hbm_per_rank": "200KiB"}


def data_plan(tmp_path, *arguments: str) -> int:
    topology = {**SMALL, "host_memory_per_host": "1GiB", "ssd_per_host": "4GiB"}
    (tmp_path / "topology.yaml").write_text(yaml.safe_dump(topology))
    command = ["plan", *DATA, "--topology", f"{tmp_path}/topology.yaml", "--search-seconds", "0.1"]
    return main([*command, "--batch-size", "64", "--json", f"{tmp_path}/plan.json", *arguments])


@pytest.mark.usefixtures("small_data")
def test_the_tables_of_a_data_set_are_planned_for_what_its_batches_use(tmp_path, capsys):
    assert data_plan(tmp_path) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    trace = open_trace("synthetic:zipf:1.05", batch_size=64, batches=20, tables=3, rows=5000)
    used = describe(trace)
    text = capsys.readouterr().out
    assert f"20 batches of 64 examples on 1 rank use {used.footprint:,} of 15,000 rows" in text
    assert report["batch_size_per_rank"] == 64
    assert not re.search(r"e-1\d [um]s", text), "what rounding leaves of zero is no reason, and no time"
    for table in report["tables"]:
        assert (table["num_embeddings"], table["embedding_dim"]) == (5000, 8)
        ((predicted,), (cold,)) = table["predicted"], table["cold_start"]
        distinct = used.per_table[table["name"]]["unique_ratio"] * 64
        assert (predicted["unique_rows"] + cold["unique_rows"]) / 2 == pytest.approx(distinct)
    more = ["--plan", f"{tmp_path}/plan.json", "--json", f"{tmp_path}/out.json"]
    assert main(["train", *DATA, *more]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["examples"] == 20 * 64
    for line in figures["plan"]["tables"]:
        assert line["rows"] == pytest.approx(line["predicted_rows"], rel=0.1)


class Ended:
    """A data set of 1,000 examples."""

    num_train = 1000

    def __init__(self, *_: object, **__: object) -> None:
        self._endless = load("synthetic:zipf:1.05", rows=300, tables=2)

    def __getattr__(self, name):
        return getattr(self._endless, name)

    def train(self, batch_size):
        return islice(self._endless.train(batch_size), 1000 // batch_size)


def test_a_data_set_that_ends_is_read_to_its_end(files, capsys, monkeypatch):
    monkeypatch.setattr("tierstore.data.load", Ended)
    command = ["plan", "--data", "ended", "--topology", f"{files}/topology.yaml", "--search-seconds", "0.1"]
    assert main([*command, "--batch-size", "25"]) == 0
    assert "20 batches of 50 examples on 2 ranks use " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "t.yaml"], "give the tables: --tables YAML, or --data NAME"),
        (["--tables", "t.yaml", "--steps", "5"], "--steps is about a data set; give --data NAME, too"),
        (["--tables", "t.yaml", "--policy", "lru"], "--policy is about a data set; give --data NAME, too"),
        ([*DATA, "--policy", "mru"], "unknown policy 'mru'"),
        ([*DATA, "--policy", "belady"], "needs the whole future"),
        ([*DATA, "--tables", "t.yaml"], "with --data it is the number of tables of generated data"),
        ([*DATA, "--batch-size", "0"], "--batch-size is 0; it must be at least 1"),
        ([*DATA, "--steps", "0"], "--steps is 0; it must be at least 1"),
        (DATA[:-2], "never ends; say after how many batches to stop, by --steps"),
        (["--data", "cats"], "unknown data 'cats'; known are flights"),
        ([*DATA, "--optimizer", "newton"], "newton"),
        ([*DATA, "--tables", "0"], "tables"),
    ],
)
def test_data_that_cannot_be_planned(files, arguments, message, capsys):
    assert main(["plan", "--topology", f"{files}/topology.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")


def test_recorded_curves_and_constraints_are_used(files):
    recorded = {"sizes_rows": [1e6], "unique_miss_ratio": [0.01], "unique_rows": 500, "accesses": 2000}
    (files / "mrc.json").write_text(json.dumps({"tables": {"users": recorded}}))
    (files / "demands.yaml").write_text(yaml.safe_dump({"users": {"sharding_types": ["column_wise"]}}))
    extra = ["--stats", f"{files}/mrc.json", "--constraints", f"{files}/demands.yaml"]
    assert plan(files, "--json", f"{files}/out.json", *extra) == 0
    users = json.loads((files / "out.json").read_text())["tables"][0]
    assert users["sharding_type"] == "column_wise"
    assert users["predicted_hit_rate"] >= 0.99


def test_what_does_not_fit_exits_with_1_and_says_what_is_missing(files, capsys):
    (files / "topology.yaml").write_text(yaml.safe_dump({**TOPOLOGY, "ssd_per_host": "1GB"}))
    assert plan(files, "--json", f"{files}/out.json") == 1
    report = json.loads((files / "out.json").read_text())
    assert (report["feasible"], report["binding"]) == (False, "ssd")
    assert report["missing_bytes"] > 1e10
    assert "ssd is short of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tables.yaml", "[", "is not YAML"),
        ("tables.yaml", "a: 1", "expected a list"),
        ("tables.yaml", "- {name: a}", "num_embeddings, embedding_dim missing"),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, rows: 3}",
            "unknown fields ['rows']",
        ),
        ("tables.yaml", "- {name: a, num_embeddings: x, embedding_dim: 4}", "num_embeddings is 'x'"),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, pooling: MAXIMUM}",
            "pooling is 'MAXIMUM'; it must be one of ['SUM', 'MEAN', 'MAX', 'NONE']",
        ),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, optimizer: 3}",
            "optimizer '3'; known",
        ),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, feature_names: abc}",
            "must be a list of names",
        ),
        ("tables.yaml", "- {name: a, num_embeddings: 5, embedding_dim: 4, weighted: 'no'}", "true or false"),
        ("tables.yaml", "- {name: a, num_embeddings: 5, embedding_dim: 4, popularity: 3}", "popularity is 3"),
        ("tables.yaml", "- {name: a, num_embeddings: null, embedding_dim: 4}", "num_embeddings missing"),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, 5: 3, rows: 2}",
            "unknown fields [5, ",
        ),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, touched_rows: x}",
            "touched_rows is 'x'",
        ),
        ("tables.yaml", "- {name: a, num_embeddings: 5, embedding_dim: 1e30}", "1048576 columns at most"),
        (
            "tables.yaml",
            "- {name: a, num_embeddings: 5, embedding_dim: 4, data_type: INT8}",
            "use FP32, FP16 or BF16",
        ),
        (
            "tables.yaml",
            "- {name: a, name: b, num_embeddings: 5, embedding_dim: 4}",
            "['name'] are there more",
        ),
        ("tables.yaml", "- {name: 7, num_embeddings: 5, embedding_dim: 4}", "entry 0 has the name 7"),
        ("topology.yaml", "hosts: 1", "hbm_per_rank, host_memory_per_host missing"),
        ("topology.yaml", "5: 1\ngpus: 2", "unknown fields [5, 'gpus']"),
        (
            "topology.yaml",
            "hbm_per_rank: 1GiB\nhost_memory_per_host: 0\nhbm_bw: .nan",
            "hbm_bw is nan; it must be a positive number",
        ),
        (
            "topology.yaml",
            "hbm_per_rank: 1GiB\nhost_memory_per_host: 0\nrow_seconds: {lookup: x}",
            "row_seconds['lookup'] is 'x'; it must be seconds",
        ),
        ("topology.yaml", "gpus: 1", "unknown fields ['gpus']"),
        ("topology.yaml", "- 1", "topology: expected a mapping"),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(files, capsys, file, text, message):
    (files / file).write_text(text)
    assert plan(files) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("users: 3", "constraints of 'users': expected a mapping of ["),
        ("users: {tiers: hbm}", "constraints of 'users': tiers is 'hbm'; it must be a list"),
        ("users: {device_group: 1}", "device_group is 1; it must be a list"),
        ("users: {min_partition: wide}", "min_partition is 'wide'; it must be a positive integer"),
        ("users: {rows: 3}", "unknown fields ['rows']; known: ["),
        ("users: {5: 1, rows: 3}", "unknown fields [5, 'rows']"),
        ("users: {device_group: [x]}", "constraints of 'users': device_group ['x'] must be ranks"),
        ("users: {tiers: [[hbm]]}", "constraints of 'users': tiers is"),
        ("users: {}\nusers: {}", "['users'] are there more than once"),
        ("cars: {}", "constraints name unknown tables ['cars']"),
    ],
)
def test_bad_constraints_are_one_line_and_exit_code_2(files, capsys, text, message):
    (files / "demands.yaml").write_text(text)
    assert plan(files, "--constraints", f"{files}/demands.yaml") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["exact_row_wise_adagrad", "RowWiseAdagrad", "rowwise_adagrad", "rowwise-adagrad"]
)
def test_optimizers_may_have_the_names_of_fbgemm_and_of_our_classes(name):
    tables = [{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "optimizer": name}]
    assert specs_of_yaml(tables)[0].optimizer == "rowwise_adagrad"


def test_all_fields_of_embedding_bag_config_are_accepted_and_empty_ones_left_out():
    fields = {
        **{"name": "a", "num_embeddings": 5e6, "embedding_dim": 30, "feature_names": ["f", "g"]},
        **{"data_type": "FP32", "pooling": "MEAN", "init_fn": None, "need_pos": False, "input_dim": None},
        **{"weight_init_max": 0.1, "weight_init_min": -0.1, "num_embeddings_post_pruning": None},
        **{"total_num_buckets": None, "use_virtual_table": True, "virtual_table_eviction_policy": None},
        **{"enable_embedding_update": False, "stash_weights": False, "pooling_factor": None},
        **{"optimizer": None, "popularity": None, "touched_rows": None, "weighted": None},
    }
    assert specs_of_yaml([fields]) == specs_of_yaml(
        [{"name": "a", "num_embeddings": 5_000_000, "embedding_dim": 30, "feature_names": ["f", "g"]}]
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "stats of table 'users': expected a mapping, got 3"),
        ({}, "'unique_miss_ratio' is missing"),
        ({"unique_miss_ratio": [0.1], "sizes_rows": [1]}, "'unique_rows' is missing"),
        ({"unique_miss_ratio": [0.1, 0.2], "sizes_rows": [1]}, "as many miss ratios as sizes"),
    ],
)
def test_bad_curves_are_one_line_and_exit_code_2(files, capsys, values, message):
    (files / "mrc.json").write_text(json.dumps({"tables": {"users": values}}))
    assert plan(files, "--stats", f"{files}/mrc.json") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tables", "--topology", "--constraints", "--stats"])
def test_files_that_cannot_be_read_are_named(files, capsys, option):
    for path, why in ((files / "none.yaml", "No such file"), (files, "Is a directory")):
        assert plan(files, option, str(path)) == 2
        assert f"error: {option} {path}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [(".", "is a folder"), ("out.xyz", "ends in one of .png, .pdf, .svg"), ("tables.yaml/x.png", "")],
)
def test_a_figure_that_cannot_be_drawn_is_said_before_planning(files, capsys, path, message):
    assert plan(files, "--plot", f"{files}/{path}") == 2
    output = capsys.readouterr()
    assert "--plot" in output.err
    assert message in output.err
    assert not output.out


def test_an_interrupted_plan_leaves_no_file(files, capsys, monkeypatch):
    def stop(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("tierstore.planner.planner.solve", stop)
    before = sorted(path.name for path in files.iterdir())
    assert plan(files, "--json", f"{files}/out.json", "--plot", f"{files}/out.png") == 130
    assert sorted(path.name for path in files.iterdir()) == before


def test_tables_fit_80_columns_and_equal_ranks_are_one_line(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (files / "topology.yaml").write_text(yaml.safe_dump({**TOPOLOGY, "hosts": 2, "ranks_per_host": 4}))
    (files / "tables.yaml").write_text(yaml.safe_dump(TABLES[:1]))
    assert plan(files) == 0
    output = capsys.readouterr().out
    lines = output[output.index("8 ranks") : output.index("fits; ")].splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.strip().startswith("0-7 ") for line in lines) == 1


@pytest.mark.parametrize("device", [["cpu"], {"cpu": 1}, "tpu"])
def test_a_device_that_is_none(files, capsys, device):
    (files / "topology.yaml").write_text(yaml.safe_dump({**TOPOLOGY, "device": device}))
    assert plan(files) == 2
    assert 'it must be "cuda" or "cpu"' in capsys.readouterr().err


@pytest.mark.parametrize("hbm", ["2GiB", "1KiB"])
def test_names_are_printed_as_they_are(files, capsys, hbm):
    """Square brackets mark styles for rich, which would leave them out, or raise an error."""
    names = ["genres[bold]", "user[/x]"]
    (files / "tables.yaml").write_text(yaml.safe_dump([TABLES[1] | {"name": name} for name in names]))
    constraints = {"user[/x]": {"tiers": ["hbm"]}}
    (files / "constraints.yaml").write_text(yaml.safe_dump(constraints))
    (files / "topology.yaml").write_text(yaml.safe_dump({**TOPOLOGY, "hbm_per_rank": hbm}))
    (files / "[").mkdir()
    figure = f"{files}/[/out].svg"
    plan(files, "--constraints", f"{files}/constraints.yaml", "--plot", figure)
    output = capsys.readouterr().out
    assert figure in output
    assert all(name in output for name in names)


def test_a_report_that_cannot_be_written_is_said_before_planning(files, capsys):
    (files / "folder").mkdir()
    assert plan(files, "--json", f"{files}/folder") == 2
    assert "--json" in capsys.readouterr().err
