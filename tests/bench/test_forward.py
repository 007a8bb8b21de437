"""``bench.research.forward`` measures each module, and takes the stages off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.research import forward, main
from tierstore import _core

MODULES = ["EmbeddingBag", "Embedding", "EmbeddingBagCollection", "EmbeddingCollection"]


@pytest.mark.parametrize("more", [[], ["--eval"]])
def test_every_module_is_measured(more: list[str], tmp_path: Path) -> None:
    out, threads, others = tmp_path / "out.json", _core.num_threads(), torch.get_num_threads()
    try:
        arguments = ["--features", "2", "--rounds", "2", "--json", str(out), *more]
        assert main(None, forward.add_arguments, forward.run, arguments) == 0
    finally:
        _core.set_num_threads(threads)
        torch.set_num_threads(others)
    found = json.loads(out.read_text())
    for name in MODULES:
        for part in ("forward", "step's forward", "step"):
            assert 0 < found[f"{name} {part} python us"] < found[f"{name} {part} us"]
    assert found["empty function forward us"] > 0
