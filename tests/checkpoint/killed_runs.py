"""Kills real ``tierstore train`` processes, resumes them until they end, and compares the end with an
undisturbed run.

Run as a program, since it forks: its children start with everything imported, and it has no threads itself.
``python -m tests.checkpoint.killed_runs FOLDER ENGINE KILLS SEED`` prints how many were killed, and where.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierstore.data.synthetic
from tests.checkpoint.forks import finish, forked, wait
from tierstore.checkpoint.folder import Folder
from tierstore.cli.main import main
from tierstore.cli.setup import finish_imports
from tierstore.store import open_store

DATA = "--data synthetic:zipf:1.05 --rows 3000 --tables 2 --batch-size 64 --steps 45".split()  # noqa: SIM905
TIERS = "--dim 8 --threads 1 --hbm 1/16 --uvm 1/32 --checkpoint-every 2 --resume".split()  # noqa: SIM905
SAME = ("final_loss", "auc", "batches", "examples")
_NOT_OF_TRAINING = ("seconds", "peak_rss_bytes", "counters", "path", "random")


def train(folder: Path, engine: str) -> int:
    """A whole ``tierstore train`` that is saved in ``folder``, as on the command line."""
    tierstore.data.synthetic.TEST_EXAMPLES = 256
    run = ["--engine", engine, "--checkpoint", str(folder / "run"), "--json", str(folder / "out.json")]
    return main(["train", *DATA, *TIERS, *run])


def result(folder: Path) -> dict[str, Any]:
    """What a finished run came to: its figures, and a digest of every bit that it trained."""
    figures = json.loads((folder / "out.json").read_text())
    unit = Folder(folder / "run").units()[-1]
    state = unit.read_state()
    digest = hashlib.sha256(json.dumps(_of_training(state)).encode())
    for name, tensor in sorted(unit.read_tensors().items()):
        if not name.startswith("random."):
            digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    rows = 0
    with open_store(folder / "run" / "rows", at=unit.tag) as store:
        for table in state["stores"][0]["tables"]:
            for keys in store.keys(table["index"]):
                keys = np.sort(keys)
                values = np.empty((len(keys), table["row_bytes"]), np.uint8)
                assert store.read(keys, values).all()
                digest.update(keys.tobytes() + values.tobytes())
                rows += len(keys)
    return {**{key: figures[key] for key in SAME}, "rows": rows, "digest": digest.hexdigest()}


def _of_training(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _of_training(item) for key, item in state.items() if key not in _NOT_OF_TRAINING}
    return [_of_training(item) for item in state] if isinstance(state, list) else state


def result_of(folder: Path) -> dict[str, Any]:
    """:func:`result` in a child of its own, since opening stores starts threads."""
    finish(folder, lambda: (folder / "result.json").write_text(json.dumps(result(folder))) * 0)
    return json.loads((folder / "result.json").read_text())


def kill_and_resume(folder: Path, engine: str, kills: int, seed: int) -> Counter[int]:
    """Kills ``kills`` processes at random moments, in as many runs as that takes; the steps last saved by
    each."""
    rng = random.Random(seed)
    calm = folder / "undisturbed"
    calm.mkdir(parents=True)
    started = time.monotonic()
    finish(calm, lambda: train(calm, engine))
    longest = 0.6 * (time.monotonic() - started)
    expected = result_of(calm)
    killed_at: Counter[int] = Counter()
    runs = 0
    while killed_at.total() < kills:
        run = folder / f"run{runs}"
        run.mkdir()
        runs += 1
        before, at = killed_at.total(), -1
        while True:
            child = forked(lambda run=run: train(run, engine), run / "log")
            time.sleep(rng.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            code = wait(child)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise AssertionError(f"{run}: exit code {code}:\n{(run / 'log').read_text()}")
            last, at = at, saved_step(run / "run")
            killed_at[at] += 1
            if at == last:
                longest *= 1.02
        if killed_at.total() < before + 3:  # the machine was busier when the undisturbed run was timed
            longest *= 0.9
        found = result_of(run)
        assert found == expected, f"{run} (seed {seed}): {found} instead of {expected}"
        shutil.rmtree(run)
    return killed_at


def saved_step(folder: Path) -> int:
    """Steps of the newest checkpoint's files, -1 if there are none."""
    return max((unit.step for unit in Folder(folder).units()), default=-1)


if __name__ == "__main__":
    finish_imports()
    torch.set_num_threads(1)
    where = kill_and_resume(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print(f"{where.total()} killed, after {sorted(where.items())}")
