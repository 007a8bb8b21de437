"""``tierstore train --plan`` under a real torchrun on this machine, and the plans that it trains by."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests import warm
from tierstore.cli.main import main

ROOT = Path(__file__).parents[2]
TABLES = ["t0", "t1", "t2"]
DATA = ["--data", "synthetic:zipf:1.05", "--rows", "4000", "--tables", "3", "--dim", "8"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def make_plan(
    folder: Path,
    cuts: Sequence[str] = ("row_wise", "table_wise", "column_wise"),
    ranks: int = 2,
    hbm: str = "400KiB",
    host: str = "1GiB",
) -> Path:
    """What ``tierstore plan`` makes of the data set's tables, each cut in one of these ways."""
    tables = [{"name": name, "num_embeddings": 4000, "embedding_dim": 8} for name in TABLES]
    sizes = {"hbm_per_rank": hbm, "host_memory_per_host": host, "ssd_per_host": "4GiB"}
    demands = {
        name: {"sharding_types": [cut], "min_partition": 4, "tiers": ["hbm", "uvm", "ssd"]}
        for name, cut in zip(TABLES, cuts, strict=True)
    }
    files = {
        "tables": tables,
        "topology": {"hosts": 1, "ranks_per_host": ranks, **sizes},
        "constraints": demands,
    }
    options = []
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        options += [f"--{name}", str(folder / f"{name}.yaml")]
    more = ["--batch-size", "64", "--search-seconds", "0.2", "--json", str(folder / "plan.json")]
    assert main(["plan", *options, *more]) == 0
    return folder / "plan.json"


def command(*arguments: str | Path, ranks: int = 2) -> list[str]:
    """Return the arguments of torchrun."""
    launch = ["--standalone", "--nproc-per-node", str(ranks), "-m", "tests.cli.small_command"]
    return [*launch, "train", *DATA, "--threads", "1", *map(str, arguments)]


def train(*arguments: str | Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Train on ranks; return what torchrun and its ranks printed."""
    return subprocess.run(
        [str(warm.folder() / "torchrun"), *command(*arguments, ranks=ranks)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, **ENVIRONMENT},
    )


def trained(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """Train on ranks to the end; return the JSON figures."""
    done = train(*arguments, "--json", folder / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return figures


def own_lines(text: str) -> list[str]:
    """Lines that the command printed, without torchrun's own account."""
    ours = ("error: ", "rank ", "saved after", "interrupted", "usage", "stopping", "nothing is kept")
    return [line for line in text.splitlines() if line.startswith(ours)]


def disturbed(folder: Path, *arguments: str | Path, kill: int | None = None) -> list[str]:
    """Train until there is a checkpoint; then kill this rank, or send torchrun Ctrl-C. Return own lines."""
    with open(folder / "stderr", "w+") as errors:
        run = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command("--steps", "100000", *arguments)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **ENVIRONMENT, "PYTHON_EXEC": warm.python(), "SHOWN_EVERY_S": "1"},
        )
        try:
            _wait_for_progress(folder / "stderr", run)
            if kill is None:
                run.send_signal(signal.SIGINT)
            else:
                os.kill(_pid_of_rank(run.pid, kill), signal.SIGKILL)
            run.wait(timeout=60)
        finally:
            run.kill()
            run.wait()
        assert run.returncode != 0
        return own_lines((folder / "stderr").read_text())


def _wait_for_progress(file: Path, run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while "tiered: " not in file.read_text():
        assert run.poll() is None, file.read_text()
        assert time.monotonic() < end, "no progress"
        time.sleep(0.1)


def _pid_of_rank(launcher: int, rank: int) -> int:
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
                return int(child)
    raise AssertionError(f"rank {rank} is not there")
