"""No order of calls deadlocks a prefetch over several row layouts, or changes what is computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("random_orders.py")
LOOPS = 60


def test_random_loops() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "0", str(LOOPS)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.stdout == f"{LOOPS} loops of 16 batches\n"
