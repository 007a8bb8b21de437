"""What pages promise beyond running: each check gets the names that the page's code left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_policies
from cache_policies import simulate
from tests.docs.pages import ROOT, blocks_of

Names = dict[str, Any]


def check_checkpoint(names: Names) -> None:
    """Compare a training that was stopped and resumed with one that never stopped."""
    Path("undisturbed").mkdir()
    names["folder"] = Path("undisturbed")
    assert names["train"]() == names["resumed"]


def check_policy(names: Names) -> None:
    """Find the policy of the page short and better than LRU, and all hooks named."""
    page = ROOT / "docs/how-to/policy.md"
    slru, trace = "slru:Slru", names["trace"]
    first = next(block.text for block in blocks_of(page) if block.language == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 65
    misses = {policy: simulate(trace, policy, 10_000).misses for policy in (slru, "lru", "belady")}
    assert misses["belady"] < misses[slru] < misses["lru"]
    assert {result.policy for result in names["results"]} == {"slru", "lru", "belady"}
    for hook in (*cache_policies.Policy.hook_names(), "admit"):
        assert f"`{hook}(s, " in page.read_text(encoding="utf-8")


CHECKS: dict[str, Callable[[Names], None]] = {
    "docs/how-to/checkpoint.md": check_checkpoint,
    "docs/how-to/policy.md": check_policy,
}
