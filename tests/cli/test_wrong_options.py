"""Options that cannot be are refused before a command works: one line names them and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from tierstore.cli.main import main
from tierstore.data.synthetic import SyntheticDataset

ZIPF = "synthetic:zipf:1"
TRAIN = f"train --data {ZIPF} --rows 100 --tables 1 --dim 4 --steps 1"
STEADY = "bench steady --rows 1000 --tables 2 --no-fbgemm"
BASELINES = f"bench baselines --data {ZIPF} --steps 9 --rows 1000 --tables 2 --systems in-memory,tiered"
HIT_RATE = f"bench hit-rate {ZIPF} --batches 9"
TOPOLOGY = Path(__file__).with_name("topology.yaml")
PLAN = f"plan --topology {TOPOLOGY}"
RECORD = f"trace record {ZIPF} --batches 9"

WRONG = [
    # sizes of 0, and sizes beyond the machine
    (f"{STEADY} --rounds 0", "--rounds is 0; it must be at least 1"),
    (f"{STEADY} --dim 0", "--dim is 0; it must be at least 1"),
    (f"{STEADY} --threads 0", "--threads is 0; it must be at least 1"),
    (f"{STEADY} --threads 1000000", "--threads is 1000000; it must be at most 1024"),
    (f"{STEADY} --rows 99999999999999", "--rows, --tables, --max-rows, --dim: the rows"),
    (f"{STEADY} --batch-size 99999999999", "--batch-size, --rounds, --run-in, --steps: 5,600 batches"),
    (f"{BASELINES} --rounds 0", "--rounds is 0; it must be at least 1"),
    (f"{BASELINES} --batch-size 99999999999", "--batch-size, --steps: 2 batches would take"),
    ("bench checkpoint --rows 0", "--rows is 0; it must be at least 1"),
    ("bench checkpoint --rows 999999999999", "--rows: a permutation of the rows would take 7.276 TiB"),
    ("bench checkpoint --dense 99999999999999", "--dense: the dense parameters and their gradients"),
    ("bench checkpoint --rounds 0", "--rounds is 0; it must be at least 1"),
    ("bench device --ranks 0", "--ranks is 0; it must be at least 1"),
    ("bench device --ranks 100000", "--ranks is 100000; the"),
    ("bench device --seconds 0", "--seconds is 0; it must be above 0"),
    ("bench device --queue-depth 100000", "--queue-depth is 100000; it must be at most 4096"),
    ("bench device --file-size 0", "--file-size is 0; a drive is measured on at least 4 MiB"),
    ("bench device --file-size 1000TiB", "--file-size: the file would take 1000 TiB in"),
    ("bench gpu --minutes 0", "--minutes is 0; it must be above 0"),
    ("bench kernels --tables 0", "--tables is 0; it must be at least 1"),
    ("bench kernels --rows 999999999999", "--tables, --rows, --dim: the rows would take"),
    (
        "bench kernels --batch-size 99999999999",
        "--tables, --batch-size, --pooling-factor, --dim: the",
    ),
    (f"bench planning --data {ZIPF} --rows 0", "--rows is 0; it must be at least 1"),
    (f"bench planning --data {ZIPF} --threads 0", "--threads and --run-in must be at least 1"),
    ("bench sharding --steps 0", "--steps is 0; it must be at least 1"),
    ("bench sharding --ranks 100000", "--ranks is 100000; the"),
    ("bench sharding --rows 999999999999", "--tables, --rows, --dim: the rows would take"),
    ("bench store --rows 0.5", "--rows times --id-spread must be from 1 to"),
    ("bench store --rows 1e13", "--rows, --id-spread: a permutation of the ids would take"),
    ("bench store --row-bytes 7", "--row-bytes is 7; it must be a multiple of 16"),
    ("bench store --window 999999999", "--window, --batch, --row-bytes: a window of batches"),
    ("bench store --device-file 1000TiB", "--device-file: the file would take 1000 TiB in"),
    (f"{HIT_RATE} --sizes 1B", "--sizes: 1B does not hold a single row"),
    (f"{HIT_RATE} --threads 0", "--threads is 0; it must be at least 1"),
    (f"{HIT_RATE} --iops 0", "--iops is 0; it must be above 0"),
    (f"{TRAIN} --tables 1000000", "--tables is 1000000; it must be at most 65535"),
    (f"{TRAIN} --batch-size 100000000000", "--batch-size, --dim: a batch of one table would take"),
    (f"{TRAIN} --dim 1000000000", "--dim: the dense layers, their gradients and optimizer would take"),
    (f"{TRAIN} --hbm 100000TiB", "--hbm and uvm are 97.66 PiB, and this process can have"),
    (f"{TRAIN} --policy belady", "policy 'belady' needs the whole future of a trace"),
    (f"{TRAIN} --hbm much", "--hbm is 'much'; write bytes"),
    # files that are read, and options of something else
    (f"{PLAN} --data {ZIPF} --steps 9 --constraints nowhere", "--constraints nowhere: No such file"),
    (f"{PLAN} --data {ZIPF} --steps 9 --stats nowhere", "--stats nowhere: No such file"),
    (f"{PLAN} --data {ZIPF} --steps 9 --dense-memory much", "--dense-memory is 'much'; write bytes"),
    (f"{PLAN} --tables t.yaml --dim 5", "--dim is about a data set; give --data NAME, too"),
    (f"{PLAN} --tables t.yaml --optimizer sgd", "--optimizer is about a data set; give --data NAME, too"),
    # shares
    ("bench checkpoint --changed 2", "--changed must be above 0 and at most 1, not 2"),
    (f"{RECORD} --out t.npz --rate 0", "--rate must be above 0 and at most 1, not 0"),
    (f"{STEADY} --hbm 2/1", "--hbm 2/1: a fraction of the tables' bytes must be above 0 and at most 1"),
    (f"{BASELINES} --hbm 1/0", "--hbm 1/0: cannot divide by 0"),
    (f"{BASELINES} --hbm 1/x", "--hbm is '1/x'; give a fraction of the tables' bytes, such as 1/37"),
    (f"{STEADY} --read-ahead=-1/8", "--read-ahead is '-1/8'; give a fraction"),
    # names
    (f"{STEADY} --window soon", "--window is a number of batches or auto, not 'soon'"),
    (f"{STEADY} --read-ahead much", "--read-ahead is 'much'; write bytes"),
    (f"{STEADY} --ssd-dtype fp32,int4", "--ssd-dtype is 'int4'"),
    (f"{BASELINES} --policy nothing", "unknown policy 'nothing'"),
    (f"{BASELINES} --systems ,", "--systems: there is no ''; there are torch-sparse"),
    ("bench checkpoint --engines native,nothing", "--engines: unknown engine 'nothing'; known engines"),
    ("bench gpu --parts ,", "--parts: there is no ''; there are open"),
    ("bench sharding --cuts table_wise,nothing", "--cuts: there is no 'nothing'; there are table_wise"),
    ("bench sharding --precision fp8", "--precision: forward_precision is 'fp8'; use one of fp32"),
    ("bench store --engines native,nothing", "--engines: unknown engine 'nothing'; known engines"),
    ("bench store --engines memory:hash", "there is no 'memory:hash'; there are native:hash"),
    (f"bench record {TOPOLOGY} --command=", "--command is empty; give the command"),
    # places of results
    (f"{STEADY} --json .", "--json . is a folder; give the path of a file"),
    (f"{RECORD} --out .", "--out . is a folder; give the path of a file"),
    (f"{TRAIN} --record .", "--record . is a folder; give the path of a file"),
    (f"{TRAIN} --json f --record f", "--json and --record are both f; give each a file of its own"),
    (f"{HIT_RATE} --json f --save-curves f", "--json and --save-curves are both f; give each a file"),
    (f"{STEADY} --store {TOPOLOGY}", "topology.yaml is a file; give a folder"),
    (f"{BASELINES} --store /proc/self/store", "--store /proc/self/store: No such file or directory; give"),
    (f"{HIT_RATE} --io-dir nowhere", "--io-dir nowhere: No such file or directory; give another path"),
]


@pytest.mark.parametrize(("command", "expected"), WRONG)
def test_wrong_options(
    command: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def works(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("it draws data before all options are checked")

    monkeypatch.setattr(SyntheticDataset, "train", works)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
