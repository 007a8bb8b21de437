"""Budgets beyond the machine, and paths whose disk is not there, are refused, or asked for by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierstore
from tests.small_training import small_data
from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    TierConfig,
    TieredEmbedding,
    checkpoint,
    offload,
)
from tierstore.cache import machine
from tierstore.cli.main import main
from tierstore.errors import ConfigError

__all__ = ["small_data"]

GIB = 1 << 30


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """23 GiB of memory, a disk of 252 GiB."""
    monkeypatch.setattr(machine, "host_memory", lambda: 23 * GIB)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=252 << 18, f_frsize=4096))


def offloaded(config: TierConfig) -> Any:
    return offload(torch.nn.Sequential(torch.nn.Embedding(9, 4)), config)


WAYS: list[Callable[[TierConfig], Any]] = [
    lambda config: TieredEmbedding(9, 4, config=config),
    lambda config: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], config=config),
    offloaded,
]


@pytest.mark.parametrize("make", WAYS, ids=["module", "collection", "offload"])
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"hbm": "900GiB"}, "hbm and uvm are 900 GiB, and this process can have 23 GiB of memory"),
        ({"hbm": 12 * GIB, "uvm": 11 * GIB + 1}, "hbm and uvm are 23 GiB"),
        ({"read_ahead": "900GiB"}, "hbm, uvm and read_ahead are .*, and this process can have 23 GiB"),
        ({"hbm": 12 * GIB, "read_ahead": 11 * GIB + 1}, "hbm, uvm and read_ahead are 23 GiB"),
        ({"ssd": "900TiB"}, "ssd is 900 TiB, and the file system of .* has 252 GiB"),
        ({"ssd": 252 * GIB + 1}, "ssd is 252 GiB"),
    ],
    ids=str,
)
def test_sizes_beyond_the_machine(make: Callable, sizes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text + ".*overcommit=True"):
        make(TierConfig(path=tmp_path / "rows", **sizes))
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("make", WAYS, ids=["module", "collection", "offload"])
def test_sizes_that_the_machine_has_or_that_are_asked_for(make: Callable, tmp_path: Path) -> None:
    for number, sizes in enumerate(
        [
            {"hbm": 12 * GIB, "uvm": 11 * GIB},
            {"ssd": 252 * GIB},
            {"ssd": 0},
            {"hbm": "all"},
            {"engine": "memory", "ssd": "1TiB"},
            {"ssd": "900TiB", "hbm": "24GiB", "overcommit": True},
        ]
    ):
        lasting = sizes.keys() <= {"hbm", "uvm"} and sizes.get("hbm") != "all"
        make(TierConfig(path=tmp_path / str(number) if lasting else None, **sizes)).close()


def test_the_default_works_on_a_disk_of_any_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for blocks in (0, 1 << 10, 1 << 40):
        monkeypatch.setattr(os, "statvfs", lambda _, b=blocks: SimpleNamespace(f_blocks=b, f_frsize=4096))
        TieredEmbedding(9, 4, config=TierConfig(path=tmp_path / str(blocks))).close()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_frsize=4096))
    TieredEmbedding(9, 4, config=TierConfig(ssd="900TiB")).close()  # a file system that does not say


@pytest.mark.parametrize("make", WAYS, ids=["module", "collection", "offload"])
def test_a_disk_that_is_not_mounted(make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=rf"path is .*, but {tmp_path}/mnt does not exist; mount .*mkdir -p"
    ):
        make(TierConfig(path=tmp_path / "mnt" / "nvme" / "rows"))
    assert os.listdir(tmp_path) == []
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="runs does not exist"):
        make(TierConfig(path="runs/rows"))
    make(TierConfig(path="rows")).close()
    assert os.listdir(tmp_path) == ["rows"]


def test_checkpoints_on_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    with TieredEmbedding(9, 4, config=TierConfig(path=tmp_path / "rows")) as module:
        with pytest.raises(ConfigError, match=r"the folder of checkpoints is .* does not exist"):
            checkpoint.save(tmp_path / "mnt" / "run", module, step=0)
        checkpoint.save(tmp_path / "run", module, step=0)


@pytest.mark.usefixtures("small_data")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["train", "--data", "synthetic:zipf:1.05", "--rows", "50", "--tables", "1", "--steps", "1"]
    small += ["--batch-size", "8", "--dim", "4"]
    for option in ("--store", "--checkpoint"):
        assert main([*small, option, str(tmp_path / "mnt" / "run")]) != 0
        assert "does not exist; mount the disk that belongs there" in capsys.readouterr().err
    assert main([*small, "--hbm", "900GiB"]) != 0
    assert "this process can have 23 GiB of memory" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    assert main([*small, "--checkpoint", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}, 1000),
        ("0::/\n", {"memory.max": "77\n"}, 77),
        ("0::/a\n", {"a/memory.max": "5", "memory.max": "3"}, 3),
        ("4:memory:/x\n3:cpu:/y\n0::/\n", {"memory/x/memory.limit_in_bytes": "9", "y/memory.max": "1"}, 9),
        ("0::/gone\n", {}, None),
        (None, {}, None),
    ],
)
def test_limits_of_control_groups(
    groups: str | None, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    assert min(machine._group_limits(tmp_path / "own", tmp_path / "mounted"), default=None) == limit


def test_this_machine_has_memory_and_disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    assert machine.host_memory() > 1 << 28
    assert machine.file_system_bytes([str(tmp_path / "not" / "there")]) > 0
    assert tierstore.TierConfig().ssd == "auto"
