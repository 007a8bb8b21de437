"""Ranks that die or hang: the others say so in time, nothing is half committed, and a restart goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from tests.sharding import cases, resumed
from tests.sharding.ranks import run
from tests.sharding.test_commits import build, train
from tierstore import RankError
from tierstore.sharding import ShardedCollection, ShardingEnv


def step_and_commit(parts: ShardedCollection) -> None:
    train(parts, range(2, 3))
    parts.commit({"step": 3})


def lost(path: str, when: str) -> None:
    """Rank 1 is gone at some moment of the step, or of the commit, after the first commit."""
    env = ShardingEnv.from_process_group(timeout=timedelta(seconds=4))
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
            time.sleep(8)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankError, match="another rank of the job has died or does not answer") as raised:
        step_and_commit(parts)
    took = time.monotonic() - start
    with pytest.raises(RankError):  # and so does whatever else needs the others
        parts(batch)
    parts.close(commit=False)
    Path(path, "survivor.json").write_text(json.dumps([took, str(raised.value)]))


def one_call_more(path: str) -> None:
    """Rank 0 alone evaluates, and rank 1 waits for it in a barrier that the tables know nothing of."""
    env = ShardingEnv.from_process_group(timeout=timedelta(seconds=6))
    parts = build(env, resumed.CUTS, path)
    train(parts, range(2))
    if env.rank == 0:
        batch = cases.batches(2, 3, longest=1)[2].of([env.rank])
        said = "Rank 0 waited in the exchange of the sizes of a batch: .* also in eval"
        with torch.no_grad(), pytest.raises(RankError, match=said):
            parts(batch)
    torch.distributed.barrier()
    parts.close(commit=False)


def test_the_error_of_a_call_that_one_rank_makes_alone(tmp_path: Path) -> None:
    run(2, one_call_more, str(tmp_path))


@pytest.mark.parametrize("when", ["forward", "backward", "commit", "hangs"])
def test_the_others_say_so_and_nothing_is_half_committed(tmp_path: Path, when: str) -> None:
    with pytest.raises(AssertionError, match="rank 1: it died"):
        run(2, lost, str(tmp_path), when)
    took, _ = json.loads((tmp_path / "survivor.json").read_text())
    assert took < 10
    record = json.loads((tmp_path / "COMMIT.json").read_text())
    assert (record["number"], record["extra"]) == (1, {"step": 2})


def torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun in this process; its workers are forked with everything imported."""
    # else the new ranks find the addresses of the dead ones
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = [
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--monitor-interval=0.1",
        "--start-method=forkserver",
    ]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [*options, "--run-path", resumed.__file__, str(folder)]
    failed: list[BaseException] = []

    def launch() -> None:
        try:
            torch.distributed.run.main(command)
        except BaseException as error:
            failed.append(error)

    others = multiprocessing.active_children()
    thread = threading.Thread(target=launch, daemon=True)  # which sets no signal handlers
    thread.start()
    thread.join(timeout=120)
    for worker in multiprocessing.active_children():
        if worker not in others:
            worker.kill()
    assert not thread.is_alive(), "torchrun did not end"
    assert not failed, failed


def test_torchrun_restarts_and_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "killed", tmp_path / "never"]
    for folder in folders:
        folder.mkdir()
    torchrun(folders[0], monkeypatch)
    run(2, resumed.train, folders[1], False)
    killed, never = (torch.load(folder / "end.pt") for folder in folders)
    assert (killed.pop("begun_at"), never.pop("begun_at")) == (2, 0)
    torch.testing.assert_close(killed, never, rtol=0, atol=0)
