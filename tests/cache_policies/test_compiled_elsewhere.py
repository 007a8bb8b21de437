"""Our policies are compiled by another process, so that none that trains keeps the compiler's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ASK = """
import cache_policies
from cache_policies import native
policy = cache_policies.get("lru").compile(8)
(hooks,) = native._compiled.values()
print(sum(hook.cache_hits for hook in hooks.values()), len(hooks))
"""


def hits(cache: Path, **environment: str) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_an_empty_compile_cache_is_filled_by_another_process(tmp_path: Path) -> None:
    assert hits(tmp_path / "here", TIERSTORE_COMPILING="1") == "0 5"
    assert hits(tmp_path / "elsewhere") == "5 5"
