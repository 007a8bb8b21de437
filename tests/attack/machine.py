"""Attacks one training with random lives of processes, and compares what they leave with the training itself.

``python -m tests.attack.machine FOLDER STEPS SEED`` prints how many steps and lives the attack took. Whatever
the lives do, and however they end, the tables open again at a commit that was made, with every bit that the
training has there. No life hangs or aborts, and every exit code is the one that the user's code chose.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.attack.workload import Reference, journal_of

ROOT = Path(__file__).parents[2]
ABORTS = ("terminate called", "Fatal Python error", "Segmentation", "double free", "corrupted")
STEPS_OF_A_LIFE = (5, 90)


class Machine:
    """Starts lives one after another and holds each against the reference."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.rng = random.Random(seed)
        self.reference = Reference(seed)
        self.allowed = {0}
        """Turns at which the tables may open: the newest commit's and those of interrupted commits."""
        self.lives = self.steps = 0
        self.ends: Counter[str] = Counter()
        self.children: list[int] = []
        self._checked = 0  # lines of the journal
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # with torch imported, if tests.warm runs this
        command = [python, "-m", "tests.attack.lives", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)

    def live(self) -> None:
        """Lets one process live, and checks all that it said."""
        life, steps = self.lives, self.rng.randint(*STEPS_OF_A_LIFE)
        self.lives += 1
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(f"{self.seed} {life} {steps}\n")
        self.server.stdin.flush()
        code = self.server.stdout.readline().strip()
        self._end_children()  # those of the life before; they may outlive one life
        lines = journal_of(self.folder, life).read_text().splitlines()
        journal = [json.loads(line) for line in lines]
        log = (self.folder / f"life-{life}.log").read_text()
        try:
            self._check(journal, code, log)
        except AssertionError as error:
            tail = "\n".join(lines[max(0, self._checked - 40) : self._checked])
            where = f"seed {self.seed}, life {life} in {self.folder}"
            raise AssertionError(f"{where}: {error}\n{tail}\nexit code {code}\n{log[-6000:]}") from None
        self.steps += steps

    def _check(self, journal: list[dict[str, Any]], code: str, log: str) -> None:
        last = {"what": "nothing", "code": None}
        for self._checked, last in enumerate(journal, 1):
            turn = last.get("turn", 0)
            if last["what"] == "opened":
                assert turn in self.allowed, f"opened at turn {turn}, not at one of {self.allowed}"
                self._same(last)
                self.allowed = {turn}
            elif last["what"] == "digest":
                self._same(last)
            elif last["what"] == "committing":
                self.allowed.add(turn)
            elif last["what"] == "committed":
                self.allowed = {turn}
            elif last["what"] == "lingers":
                self.children.append(last["pid"])
        found = [word for word in ABORTS if word in log]
        assert not found, f"the process said {found}"
        ends = [line for line in journal if line["what"] == "end"]
        assert ends, "the process ended before its end"
        self.ends[ends[0]["kind"]] += 1
        assert code == str(ends[0]["code"]), f"exit code {code} instead of {ends[0]['code']}"

    def _same(self, line: dict[str, Any]) -> None:
        expected, cold = self.reference.digests(line["turn"])
        assert line["digest"] == expected, f"wrong rows {line['what']} at turn {line['turn']}"
        assert line.get("cold", cold) == cold, f"wrong cold rows at turn {line['turn']}"

    def _end_children(self) -> None:
        for child in self.children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.children.clear()

    def close(self) -> None:
        self._end_children()
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()


def attack(folder: Path, steps: int, seed: int) -> Machine:
    """Takes at least ``steps`` steps; AssertionError names the seed and the life that went wrong."""
    machine = Machine(folder, seed)
    try:
        while machine.steps < steps:
            machine.live()
    finally:
        machine.close()
    return machine


if __name__ == "__main__":
    done = attack(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(f"{done.steps} steps in {done.lives} lives, which ended {dict(done.ends)}")
