"""Kills a process at the operations of a save that abandons checkpoints; the one it came from stays whole.

Run as a program, as :mod:`tests.checkpoint.killed_saves`: ``python -m tests.checkpoint.killed_branches FOLDER
ENGINE STORES [EVERY]``.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
from pathlib import Path

import torch

from tests.checkpoint.forks import finish, forked, wait
from tests.checkpoint.killed_saves import Bomb
from tests.checkpoint.trainings import Training, equal
from tierstore.checkpoint.folder import Folder
from tierstore.cli.setup import finish_imports

_SURVIVED = 3
_OLDER, _LAST, _NEW = 1, 3, 4


def prepare(folder: Path, engine: str, stores: int) -> int:
    """Saves steps 1 to 3, and the state of each in the file ``stateN``."""
    training = Training(folder, engine, stores)
    for step in range(_OLDER, _LAST + 1):
        training.step()
        training.save(folder / "run", step, keep=_LAST)
    for step in range(_OLDER, _LAST + 1):
        training.restore(folder / "run", step=step)
        torch.save(training.everything(), folder / f"state{step}")
    training.restore(folder / "run", step=_OLDER)
    training.step()
    torch.save(training.everything(), folder / f"state{_NEW}")
    training.model.close()
    return 0


def killed(folder: Path, engine: str, stores: int, moment: int) -> int:
    bomb = Bomb(moment)
    training = Training(folder, engine, stores)
    training.restore(folder / "run", step=_OLDER)
    training.step()
    bomb.armed = True
    training.save(folder / "run", _NEW, keep=2)
    bomb.armed = False
    return _SURVIVED


def gone_on(folder: Path, engine: str, stores: int) -> int:
    """Checks what the kill has left, and saves the new step once more."""
    training = Training(folder, engine, stores)
    newest = training.restore(folder / "run")
    assert newest is not None
    assert newest.step in (_LAST, _NEW)
    equal(training.everything(), torch.load(folder / f"state{newest.step}"))
    training.restore(folder / "run", step=_OLDER)
    equal(training.everything(), torch.load(folder / f"state{_OLDER}"))
    training.restore(folder / "run", step=_OLDER)
    training.step()
    training.save(folder / "run", _NEW, keep=2)
    assert [unit.step for unit in Folder(folder / "run").units()] == [_OLDER, _NEW]
    assert [len(bag.engine.commits()) for bag in training.model.bags()] == [2] * stores
    equal(training.everything(), torch.load(folder / f"state{_NEW}"))
    training.model.close()
    (folder / "newest").write_text(str(newest.step))
    return 0


def run(folder: Path, engine: str, stores: int, every: int) -> None:
    """Tries all moments, or one of ``every``."""
    folder.mkdir(parents=True)
    begun_at: dict[int, int] = {}
    moment = random.randint(1, every)
    while True:
        here = folder / str(moment)
        here.mkdir()
        finish(here, lambda here=here: prepare(here, engine, stores))
        child = forked(lambda here=here, moment=moment: killed(here, engine, stores, moment), here / "log")
        code = wait(child)
        assert code in (_SURVIVED, -signal.SIGKILL), (here / "log").read_text()
        finish(here, lambda here=here: gone_on(here, engine, stores))
        if code == _SURVIVED:
            break
        begun_at[moment] = int((here / "newest").read_text())
        shutil.rmtree(here)
        moment += every
    assert set(begun_at.values()) == {_LAST, _NEW}, begun_at
    print(f"{len(begun_at)} of {moment - 1} moments: {begun_at}")


if __name__ == "__main__":
    finish_imports()
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2], *map(int, [*sys.argv[3:], 1][:2]))
