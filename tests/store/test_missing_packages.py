"""Without the packages of the engines rocksdb and lmdb the others work, and these two say what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.store import registry

PROGRAM = """
import sys
sys.modules["rocksdict"] = sys.modules["lmdb"] = None
import torch, tierstore, tierstore.checkpoint, tierstore.cli.main
from tierstore import TierConfig, TieredEmbeddingBag, optim

def train(engine):
    config = TierConfig(hbm="8KiB", engine=engine, path=f"{sys.argv[1]}/{engine}")
    with TieredEmbeddingBag(400, 8, mode="sum", config=config, optimizer=optim.SGD(lr=0.1)) as bag:
        for step in range(6):
            bag(torch.arange(60).view(10, 6) * (step + 1)).sum().backward()
        bag.commit()
        return bag.rows(torch.arange(400))

assert torch.equal(train("native"), train("memory"))
for engine in ("rocksdb", "lmdb"):
    try:
        train(engine)
    except tierstore.ConfigError as error:
        print(error)
"""


def test_other_engines_work_without_the_packages_of_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"engine {engine!r} needs the package {package}, which is not installed: pip install {package}, or "
        "use engine='native'"
        for engine, package in (("rocksdb", "rocksdict"), ("lmdb", "lmdb"))
    ]


def test_a_registered_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._FACTORIES, "mine", "my_engines:Mine")
    with pytest.raises(ConfigError, match="engine 'mine' needs the package my_engines"):
        registry.get_engine("mine")
