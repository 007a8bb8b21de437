"""Tables whose store is spread over several folders: bits of training in memory, checkpoints, the command."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.small_training import small_data, small_training  # noqa: F401  (a fixture)
from tierstore import ConfigError, StoreMismatchError, TierConfig, checkpoint, optim
from tierstore.cache import machine
from tierstore.cli.main import main
from tierstore.store import verify

ROWS, DIM = 20_000, 16


def table(config: TierConfig) -> Any:
    return tierstore.TieredEmbeddingBag(
        ROWS, DIM, config=config, optimizer=optim.Adam(lr=0.1), seed=3, name="t"
    )


def train(bag: Any, steps: range) -> None:
    for step in steps:
        ids = torch.randint(ROWS, (64, 16), generator=torch.Generator().manual_seed(step))
        bag(ids).square().mean().backward()


def config_of(paths: list[Path]) -> TierConfig:
    return TierConfig(hbm="256KiB", ssd="256MiB", path=paths)


def test_the_bits_of_memory(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    memory = table(TierConfig(hbm="all"))
    train(memory, range(12))
    for step, count in enumerate((1, 2, 3, 3)):
        bag = table(config_of([paths[0], *paths[1:count][:: -1 if step == 3 else 1]]))
        train(bag, range(3 * step, 3 * step + 3))
        bag.close()
    bag = table(config_of(paths))
    ids = torch.arange(ROWS)
    assert torch.equal(bag.rows(ids), memory.rows(ids))
    bag.close(commit=False)
    with pytest.raises(StoreMismatchError, match=r"device 1 \(last at .*b\) is not among its paths"):
        table(config_of([paths[0], paths[2]]))
    assert verify(paths[0]).ok


def test_a_checkpoint(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    bag = table(config_of(paths))
    train(bag, range(3))
    expected = bag.rows(torch.arange(ROWS))
    checkpoint.save(tmp_path / "saved", bag, step=3)
    train(bag, range(3, 6))
    checkpoint.restore(tmp_path / "saved", bag)
    assert torch.equal(bag.rows(torch.arange(ROWS)), expected)
    bag.close(commit=False)


def test_each_path_must_have_a_parent(tmp_path: Path) -> None:
    """The disk of a further path may not be mounted."""
    with pytest.raises(ConfigError, match="nvme1 does not exist; mount the disk"):
        table(config_of([tmp_path / "a", tmp_path / "nvme1" / "t"]))
    assert list(tmp_path.iterdir()) == []


def test_the_cap_is_for_all_file_systems_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders on one file system share it."""
    found = namedtuple("found", ["f_blocks", "f_frsize"])
    monkeypatch.setattr(machine.os, "statvfs", lambda path: found(1 << 18, 4096))
    config = TierConfig(hbm="64KiB", ssd="1.5GiB", path=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ConfigError, match=r"ssd is 1.5 GiB, and the file system of .*a, .*b has 1 GiB"):
        machine.check_machine(config)
    devices = iter((1, 2))
    stat = namedtuple("stat", ["st_dev"])
    monkeypatch.setattr(machine.Path, "exists", lambda path: True)
    monkeypatch.setattr(machine.Path, "stat", lambda path: stat(next(devices)))
    machine.check_machine(config)


@pytest.mark.usefixtures("small_data")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, stores = small_training(hbm="1/8", steps=24), [tmp_path / "nvme0", tmp_path / "nvme1"]
    assert run("--store", *stores, "--compare", "in-memory") == 0
    assert "bit_identical: true" in capsys.readouterr().out
    assert (stores[0] / "checkpoints").is_dir()
    assert run("--store", *stores) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err
    assert run("--store", *stores, "--resume") == 0
    capsys.readouterr()
    for command in ("inspect", "verify", "commits", "compact"):
        assert main([command, str(stores[0]), "--json"]) == 0
        json.loads(capsys.readouterr().out)
    assert main(["inspect", str(stores[0])]) == 0
    assert f"spread over: {stores[1]}" in capsys.readouterr().out
    assert main(["export", str(stores[0]), str(tmp_path / "export")]) == 0
    assert main(["import", str(tmp_path / "export"), str(tmp_path / "one")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(stores[1])]) == 2
    assert "is a further folder of a store" in capsys.readouterr().err
    (stores[1]).rename(tmp_path / "gone")
    for command in ("inspect", "verify", "commits"):
        assert main([command, str(stores[0])]) == 2
        assert f"device 1 (last at {stores[1]})" in capsys.readouterr().err
