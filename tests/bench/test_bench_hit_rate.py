"""``tierstore bench hit-rate``: figures, files and refusals."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from bench import hit_rate
from bench._hit_rate_answer import measure_iops
from bench._hit_rate_plot import byte_ticks
from bench._hit_rate_report import fit
from cache_policies import PolicyError, simulate
from tierstore.config import format_bytes
from tierstore.errors import ConfigError, TierStoreError
from tierstore.trace import open_trace

SOURCE = ["synthetic:zipf:1.0", "--batches", "30", "--batch-size", "128", "--tables", "2", "--rows", "2000"]
FAST = ["--iops", "50000", "--policies", "lookahead,lru"]


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    hit_rate.add_arguments(parser)
    return hit_rate.run(parser.parse_args([str(argument) for argument in arguments]))


def test_results_are_the_simulators(tmp_path, capsys):
    out = tmp_path / "r.json"
    assert run(*SOURCE, *FAST, "--sizes", "5%,700,256KiB", "--window", 4, "--depth", 1, "--json", out) == 0
    text = capsys.readouterr().out
    document = json.loads(out.read_text())
    trace = open_trace("synthetic:zipf:1.0", batch_size=128, batches=30, tables=2, rows=2000)
    batches = list(trace.key_batches())
    assert len(document["results"]) == 6
    for result in document["results"]:
        expected = simulate(batches, result["policy"], result["size_rows"], depth=1, window=4, on_demand=1)
        assert result["miss_ratio"] == expected.miss_ratio
        assert result["unique_miss_ratio"] == expected.unique_miss_ratio
        assert result["capacity_miss_ratio"] == expected.capacity_miss_ratio
        assert f"{expected.unique_miss_ratio:.4f}" in text
    sizes = {result["size_rows"]: result for result in document["results"]}
    assert 700 in sizes
    assert round(document["footprint"] * 0.05) in sizes
    by_bytes = [
        r for r in document["results"] if r["size_rows"] != 700 and 0.97 * 2**18 < r["size_bytes"] <= 2**18
    ]
    assert len(by_bytes) == 2  # policies need different memory, so different numbers of rows fit
    floor = {point["size_rows"]: point["capacity_miss_ratio"] for point in document["floors"]["belady"]}
    assert all(r["capacity_miss_ratio"] >= floor[r["size_rows"]] for r in document["results"])
    assert document["floors"]["compulsory_unique_miss_ratio"] == document["footprint"] / document["uniques"]
    assert document["floors"]["reads_per_s"] == 50_000


def test_advice_reaches_what_it_promises(tmp_path, capsys):
    out = tmp_path / "r.json"
    assert run(*SOURCE, *FAST, "--sizes", "10%", "--recommend", "--json", out) == 0
    text = capsys.readouterr().out
    assert "Recommended:" in text
    assert "with policy lookahead and a window of" in text
    advice = json.loads(out.read_text())["recommendation"]
    assert advice["capacity_miss_ratio"] <= 0.01
    assert advice["size_rows"] > 100
    assert advice["ssd_reads_per_s"] > 0


def test_tables_and_exports(tmp_path, capsys):
    export, out = tmp_path / "e.json", tmp_path / "r.json"
    assert run(*SOURCE, *FAST, "--per-table", "--save-curves", export, "--json", out) == 0
    assert "each table alone" in capsys.readouterr().out
    assert list(json.loads(export.read_text())["tables"]) == ["t0", "t1"]
    table = json.loads(out.read_text())["tables"]["t0"]
    assert table["lru"][-1]["capacity_miss_ratio"] == 0


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_plots(tmp_path, suffix):
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            run(*SOURCE, *FAST, "--plot", tmp_path / f"p{suffix}")
        return
    path = tmp_path / f"p{suffix}"
    assert run(*SOURCE, *FAST, "--sizes", "2%,20%", "--recommend", "--plot", path) == 0
    content = path.read_bytes()
    assert len(content) > 5000
    if suffix == ".html":
        assert b"<svg" in content
        assert b"lookahead" in content or b"<path" in content


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1 << 20, 1 << 22, [1 << 20, 1 << 21, 1 << 22]),
        (1000, 9000, [1024, 2048, 4096, 8192]),
        (1 << 10, 1 << 30, [1 << power for power in range(10, 31, 3)]),
        (1 << 20, (1 << 27) + 1, [1 << power for power in range(20, 28)]),
        (1100, 2047, [1100, 2047]),
        (1500, 1500, [1500]),
    ],
)
def test_ticks_in_bytes(low, high, ticks):
    assert byte_ticks(low, high) == ticks


if importlib.util.find_spec("matplotlib"):

    def test_a_plot_marks_the_budget_and_the_recommendation(tmp_path):
        import matplotlib

        tiers = ["--hbm", "64KiB", "--uvm", "64KiB", "--dim", "8", "--policy", "lookahead"]
        files = ["--plot", tmp_path / "p.svg", "--json", tmp_path / "r.json"]
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            assert run(*SOURCE, "--iops", "1e5", *tiers, "--recommend", "--sizes", "5%,50%", *files) == 0
        document = json.loads((tmp_path / "r.json").read_text())
        advice = format_bytes(document["recommendation"]["size_bytes"])
        assert document["row_bytes"] == 48  # of the tables: 8 columns and a float of state
        picture = (tmp_path / "p.svg").read_text()
        for text in ("hbm now: 64 KiB", "hbm and uvm now: 128 KiB", f"recommended (lookahead): {advice}"):
            assert f">{text}<" in picture
        assert ">64 KiB<" in picture  # a tick
        assert picture.count("opacity: 0.85") == 3  # curves behind these texts leave them readable

    def test_the_upper_axis_of_a_short_range_has_shares(tmp_path):
        import matplotlib

        sizes = ["--sizes", "4%,8%", "--policies", "lru", "--plot", tmp_path / "p.svg"]
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            assert run(*SOURCE, *FAST, *sizes) == 0
        picture = (tmp_path / "p.svg").read_text()
        assert ">6%<" in picture
        assert "×" not in picture  # as in 6 × 10^0


def test_samples_say_so(capsys):
    assert run(*SOURCE, *FAST, "--sample", "0.5", "--sizes", "10%") == 0
    found = re.search(r"estimated from (\d+\.\d+)% of the rows", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(50, abs=3)


def test_all_policies_and_batches_that_do_not_fit(capsys):
    options = ["--iops", "1e5", "--sizes", "30,10%"]
    assert run(*SOURCE, *options, "--policies", "fifo,lru", "--admission", "bloom") == 0
    assert "30!" in capsys.readouterr().out
    assert run(*SOURCE, *options, "--policies", "all") == 0
    text = capsys.readouterr().out
    assert "30!" in text
    assert "use" in text
    for name in ("arc", "static_top", "belady", "lfu_aged"):
        assert name in text


def test_the_device_is_measured(tmp_path):
    assert measure_iops(str(tmp_path)) > 10


def test_sizes_beyond_the_footprint_leave_compulsory_misses(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1000) % 50)
    out = tmp_path / "r.json"
    assert run(tmp_path / "a.npy", *FAST, "--sizes", "10000", "--json", out) == 0
    assert {r["capacity_miss_ratio"] for r in json.loads(out.read_text())["results"]} == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "0"], "is no size"),
        (["--sizes", "0%"], "is no size"),
        (["--sizes", "ten"], "--sizes"),
        (["--sizes", "100B"], "does not hold a single row"),
        (["--policies", "mru"], "unknown policy 'mru'; known: lookahead"),
        (["--policies", "belady"], "at least one online policy"),
        (["--window", "-1"], "--window"),
        (["--sample", "2"], "--sample"),
        (["--admission", "never"], "unknown admission filter"),
        (["--plot", "x.bmp"], "must end in"),
        (["--depth", "-1"], "--depth is a number of batches of at least 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((TierStoreError, PolicyError), match=message):
        run(*SOURCE, *FAST, *options)


@pytest.mark.parametrize(("width", "columns"), [(120, 4), (46, 4), (40, 3), (30, 2)])
def test_on_a_narrow_terminal_columns_go_and_figures_stay(width, columns):
    table = Table()
    for name in ("policy", "memory", "miss/access", "IO ms/batch"):
        table.add_column(name, no_wrap=True)
    table.add_row("w_tinylfu", "1.029 KiB", "0.8140", "0.1")
    console = Console(file=io.StringIO(), width=width)
    fit(table, console)
    console.print(table)
    shown = console.file.getvalue()
    assert "w_tinylfu" in shown
    assert "0.8140" in shown
    assert ("IO ms/batch" in shown, "1.029 KiB" in shown) == (columns > 3, columns > 2)


@pytest.mark.parametrize("options", [["--sizes", "50%", "--per-table"], ["--hbm", "30KiB"]])
def test_names_of_columns_are_no_marks_of_styles(tmp_path, capsys, options):
    rows = "".join(f"{i % 7},{i % 5},{i}\n" for i in range(300))
    (tmp_path / "log.csv").write_text(f"user[/b],tags[bold],e\x1b[2J\n{rows}")
    assert not run(tmp_path / "log.csv", "--columns", "all", "--batch-size", 64, *options, *FAST[:2])
    output = capsys.readouterr().out
    assert all(name in output for name in ("user[/b]", "tags[bold]", "e?[2J"))
    assert "\x1b" not in output
