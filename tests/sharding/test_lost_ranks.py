"""Ranks that die or hang: the others say so in time, nothing is half committed, and a restart goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.sharding import cases, resumed
from tests.sharding.ranks import run
from tests.sharding.test_commits import build, train
from tierstore import RankError
from tierstore.sharding import ShardedCollection, ShardingEnv

ROOT = Path(__file__).parents[2]


def step_and_commit(parts: ShardedCollection) -> None:
    train(parts, range(2, 3))
    parts.commit({"step": 3})


def lost(path: str, when: str) -> None:
    """Rank 1 is gone at some moment of the step, or of the commit, after the first commit."""
    env = ShardingEnv.from_process_group(timeout=timedelta(seconds=2))
    parts = build(env, resumed.CUTS, path)
    train(parts, range(2))
    parts.commit({"step": 2})
    batch = cases.batches(2, 3, longest=1)[2].of([env.rank])
    if env.rank == 1:
        if when == "backward":
            parts(batch)
        if when == "commit":
            train(parts, range(2, 3))
            parts.engine.commit({"commit": 2})
        if when == "hangs":
            time.sleep(4)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankError, match="another rank of the job has died or does not answer") as raised:
        step_and_commit(parts)
    took = time.monotonic() - start
    with pytest.raises(RankError):  # and so does whatever else needs the others
        parts(batch)
    parts.close(commit=False)
    Path(path, "survivor.json").write_text(json.dumps([took, str(raised.value)]))


@pytest.mark.parametrize("when", ["forward", "backward", "commit", "hangs"])
def test_the_others_say_so_and_nothing_is_half_committed(tmp_path: Path, when: str) -> None:
    with pytest.raises(AssertionError, match="rank 1: it died"):
        run(2, lost, str(tmp_path), when)
    took, _ = json.loads((tmp_path / "survivor.json").read_text())
    assert took < 10
    record = json.loads((tmp_path / "COMMIT.json").read_text())
    assert (record["number"], record["extra"]) == (1, {"step": 2})


def torchrun(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["--monitor-interval=0.2", "-m", "tests.sharding.resumed", str(folder)]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else the new ranks find the addresses of the dead ones
    }
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=180)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers
            raise
    assert process.returncode == 0, said[-4000:]


def test_torchrun_restarts_and_training_resumes(tmp_path: Path) -> None:
    folders = [tmp_path / "killed", tmp_path / "never"]
    for folder in folders:
        folder.mkdir()
    torchrun(folders[0])
    run(2, resumed.train, folders[1], False)
    killed, never = (torch.load(folder / "end.pt") for folder in folders)
    assert (killed.pop("begun_at"), never.pop("begun_at")) == (2, 0)
    torch.testing.assert_close(killed, never, rtol=0, atol=0)
