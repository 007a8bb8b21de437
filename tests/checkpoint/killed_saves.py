"""Kills a process at the file operations of a ``checkpoint.save`` in turn; each time the run goes on exactly.

Run as a program, as :mod:`tests.checkpoint.killed_runs`. Beside the operations that Python tells of, it is
killed before and after each store's commit and each commit that is given up.
``python -m tests.checkpoint.killed_saves FOLDER ENGINE STORES [EVERY]`` prints what it tried; with EVERY only
one of so many moments, others each time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.forks import finish, forked, wait
from tests.checkpoint.trainings import Training, equal
from tierstore.cache.engine import Engine
from tierstore.cli.setup import finish_imports

OPERATIONS = {"open", "shutil.rmtree", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link"}
_SURVIVED = 3


class Bomb:
    """Ends the process at the ``moment``-th operation (from 1) while it is armed."""

    def __init__(self, moment: int) -> None:
        self.left = moment
        self.armed = False
        sys.addaudithook(lambda event, arguments: self.tick() if event in OPERATIONS else None)
        for name in ("commit", "drop_commit"):
            self._surround(name)

    def tick(self) -> None:
        if self.armed:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _surround(self, name: str) -> None:
        inner: Any = getattr(Engine, name)

        def surrounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            try:
                return inner(*args, **kwargs)
            finally:
                self.tick()

        setattr(Engine, name, surrounded)


def killed_in_a_save(folder: Path, engine: str, stores: int, moment: int) -> int:
    bomb = Bomb(moment)
    training = Training(folder, engine, stores)
    for step in range(1, 5):
        training.step()
        if step % 2 == 0:
            bomb.armed = step == 4
            training.save(folder / "checkpoints", step)
            bomb.armed = False
    return _SURVIVED


def gone_on(folder: Path, engine: str, stores: int) -> int:
    """Goes on from the last checkpoint to step 6; saves what came out, and the step at which it began."""
    training = Training(folder, engine, stores)
    restored = training.restore(folder / "checkpoints")
    begun = 0 if restored is None else restored.step
    for _ in range(begun, 6):
        training.step()
    training.save(folder / "checkpoints", 6)
    left = [len(bag.engine.commits()) for bag in training.model.bags()]
    assert left == [1] * stores, left
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert len(names) == 3, names  # one checkpoint, what the folder is, its lock
    torch.save((begun, training.everything()), folder / "result")
    training.model.close()
    return 0


def one_moment(
    folder: Path, engine: str, stores: int, moment: int, expected: dict[str, torch.Tensor]
) -> int | None:
    """The step from which a run went on that was killed then; None if the save had ended before."""
    folder.mkdir()
    code = wait(forked(lambda: killed_in_a_save(folder, engine, stores, moment), folder / "log"))
    assert code in (_SURVIVED, -signal.SIGKILL), (folder / "log").read_text()
    finish(folder, lambda: gone_on(folder, engine, stores))
    begun, found = torch.load(folder / "result")
    equal(found, expected)
    shutil.rmtree(folder)
    return None if code == _SURVIVED else begun


def run(folder: Path, engine: str, stores: int, every: int) -> None:
    """Tries all moments, or one of ``every``."""
    calm = folder / "undisturbed"
    calm.mkdir(parents=True)
    finish(calm, lambda: gone_on(calm, engine, stores))
    _, expected = torch.load(calm / "result")
    begun_at: dict[int, int] = {}
    moment = random.randint(1, every)
    while (begun := one_moment(folder / "killed", engine, stores, moment, expected)) is not None:
        begun_at[moment] = begun
        moment += every
    assert list(begun_at.values()) == sorted(begun_at.values()), begun_at
    assert set(begun_at.values()) == {2, 4}, begun_at
    print(f"{len(begun_at)} of {moment - 1} moments: {begun_at}")


if __name__ == "__main__":
    finish_imports()
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2], *map(int, [*sys.argv[3:], 1][:2]))
