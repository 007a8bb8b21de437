"""The code of docs/guides/checkpoint.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/checkpoint.md"


def test_the_guide_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    ids = torch.randint(10**9, (64 * 30, 3), generator=torch.Generator().manual_seed(2))
    for name in ("killed", "undisturbed"):
        (tmp_path / name).mkdir()
    names: dict[str, Any] = {"folder": tmp_path / "killed", "data": ids}
    exec(block, names)
    names["folder"] = tmp_path / "undisturbed"
    assert names["train"]() == names["resumed"]
