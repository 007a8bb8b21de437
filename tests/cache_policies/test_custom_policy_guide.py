"""The code of docs/custom_policy.md runs, and its policy does what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

import cache_policies
from cache_policies import simulate

GUIDE = Path(__file__).parents[2] / "docs" / "custom_policy.md"


def test_the_guide_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    scope = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), scope)
    slru, trace = scope["Slru"], scope["trace"]
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) <= 65
    misses = {policy: simulate(trace, policy, 10_000).misses for policy in (slru, "lru", "belady")}
    assert misses["belady"] < misses[slru] < misses["lru"]
    assert "slru" in capsys.readouterr().out


def test_the_guide_names_every_hook():
    text = GUIDE.read_text()
    for hook in (*cache_policies.Policy.hook_names(), "admit"):
        assert f"`{hook}(s, " in text
