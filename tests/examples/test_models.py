"""The models of examples/ of torchrec's modules train to the bits of a training in memory, and learn."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.examples.scripts import EXAMPLES, losses, output_of
from tierstore import TierConfig
from tierstore.data import load

TIGHT = TierConfig(hbm="96KiB", uvm="16KiB", ssd="64MiB")
MEMORY = TierConfig(hbm="all")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name[:-3]}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained(name: str, config: TierConfig) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
    """All weights and optimizer states, the metrics, and the number of rows that were read from the store."""
    module: Any = script(name)
    if name == "deepfm.py":
        data = load("synthetic:zipf:1.05", tables=3, rows=4000)
        model = module.train(data, config, batch_size=128, steps=25)
        metrics, collections = module.evaluate(model, data, 128, batches=2), [model.bags]
    else:
        picks = module.Picks(users=4000, items=1000)
        model = module.train(picks, config, batch_size=128, steps=25)
        metrics = module.evaluate(model, picks, queries=20, offered=50)
        collections = [model.query_bags, model.item_bags]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    read = 0
    for number, bags in enumerate(collections):
        for table in bags.embedding_bag_configs():
            found = bags.optimizer_rows(torch.arange(table.num_embeddings), table.name)
            state |= {f"{number}.{table.name}.{kind}": value for kind, value in found.items()}
        read += bags.stats()["tiers"].get("ssd", {"row_hits": 0})["row_hits"]
        bags.close()
    return state, metrics, read


@pytest.mark.parametrize("name", ["deepfm.py", "two_tower.py"])
def test_tiers_train_the_bits_of_memory(name: str) -> None:
    found, metrics, read = trained(name, TIGHT)
    expected, metrics_in_memory, none = trained(name, MEMORY)
    assert read > 0 == none, "rows must come from the disk, or the test says nothing"
    assert metrics == metrics_in_memory
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def figures(lines: list[str]) -> dict[str, float]:
    found = (re.fullmatch(r"([\w@]+) +(\d\.\d+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def test_deepfm_learns(tmp_path: Path) -> None:
    small = ("--steps", 150, "--rows", 20_000, "--batch-size", 256, "--hbm", "600KiB")
    lines = output_of("deepfm.py", tmp_path, *small)
    assert len(losses(lines)) == 3
    found = figures(lines)
    assert found.keys() == {"auc", "gauc", "log_loss", "normalized_entropy"}
    assert found["auc"] > 0.65
    assert found["gauc"] > 0.65
    assert found["normalized_entropy"] < 0.96


def test_two_towers_learn(tmp_path: Path) -> None:
    small = ("--steps", 150, "--users", 4000, "--items", 1000, "--batch-size", 128, "--hbm", "300KiB")
    found = figures(output_of("two_tower.py", tmp_path, *small))
    assert found.keys() == {"ndcg@10", "recall@10"}
    assert found["recall@10"] > 0.1, "ten of 400 items at random are a fortieth"
