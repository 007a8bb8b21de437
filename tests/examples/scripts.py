"""Runs a script of examples/ as a user does: in a process of its own, or by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests import warm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LONGEST_S = 170
"""A script takes a few seconds with the arguments of a test, and more on a busy machine."""


def output_of(script: str, folder: Path, *arguments: object, ranks: int = 0) -> list[str]:
    """Return the lines that the script printed in ``folder``; with ``ranks`` it is started by torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
    done = subprocess.run(
        [warm.python(), *launch, str(EXAMPLES / script), *map(str, arguments)],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def losses(lines: list[str]) -> dict[int, str]:
    """Return the losses as they were printed, by step."""
    found = (re.match(r"step (\d+)  loss (\S+)", line) for line in lines)
    return {int(match[1]): match[2] for match in found if match}
