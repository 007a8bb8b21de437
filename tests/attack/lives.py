"""One life of a process under attack: it opens the tables, does random things to them, and ends in some way.

Run as a program, ``python -m tests.attack.lives FOLDER``: for every line ``SEED LIFE STEPS`` of standard
input a forked child lives, and ends as an interpreter of its own would. The answer is the child's exit code,
or ``hang``.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import cache_policies
import tierstore
from tests.attack.workload import (
    Batch,
    cold_digest,
    digest,
    journal_of,
    open_model,
    overwrite,
    stream,
    turn_of,
)
from tierstore.cli.setup import finish_imports
from tierstore.errors import TierStoreError
from tierstore.pipeline.made import MANY_THREADS

HANG_SECONDS = 60
NAP_SECONDS = 0.01
LINGER_SECONDS = 300
UNCAUGHT = 1
POLICIES = ["lookahead", "lru", "lfu"]


class Interrupt(Exception):
    """Raised by the signal handler, wherever the main thread is."""


class Boom(Exception):
    """Raised by a user's code."""


class Turns(Dataset):
    """The batches of a range of turns, for the workers of a DataLoader."""

    def __init__(self, seed: int, first: int, turns: int) -> None:
        self.batches = list(stream(seed, first, turns))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


class Life:
    """The operations; ``run`` chooses among them until ``steps`` are done."""

    def __init__(self, folder: Path, seed: int, life: int, steps: int) -> None:
        self.rng = random.Random(f"{seed}-{life}")
        self.seed, self.left = seed, steps
        self.workers = False
        self.few = self.rng.random() < 0.3
        """Whether descriptors are few. The tensors of a DataLoader's workers take one each: too many then."""
        self.folder = folder
        self._journal = os.open(journal_of(folder, life), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._pause = 0
        signal.signal(signal.SIGALRM, self._interrupt)

    def say(self, what: str, **details: Any) -> None:
        """Adds a line to the journal, which outlives any end of the process."""
        os.write(self._journal, (json.dumps({"what": what, **details}) + "\n").encode())

    # -- beginning and end -----------------------------------------------------------------

    def run(self) -> None:
        rng = self.rng
        if self.few:
            limit = rng.choice([80, 160])
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        torch.set_num_threads(1)
        threads = rng.choice([1, 2, MANY_THREADS])
        tierstore.set_num_threads(threads)
        uvm = rng.choice([0, 0, "96KiB", "1MiB"])
        config = tierstore.TierConfig(
            hbm=rng.choice(["48KiB", "160KiB", "3MiB"]),
            uvm=uvm,
            ssd=rng.choice(["48MiB", "1GiB"]),
            path=self.folder / "tables",
            policy=rng.choice(POLICIES),
            depth=rng.choice([0, 1, 2, 5]),
            window=rng.choice([0, 1, 4, 30]),
        )
        sizes = {"hbm": config.hbm, "uvm": uvm, "ssd": config.ssd}
        self.say("open", **sizes, depth=config.depth, window=config.window, threads=threads)
        self.model, self.tables = open_model(config)
        self.turn = int(self.tables.engine.committed_extra().get("turn", 0))
        self.say("opened", turn=self.turn, digest=digest(self.tables), cold=cold_digest(self.tables))
        while self.left > 0:
            rng.choice([self.on_demand, self.ahead, self.ahead, self.between])()
        self.end()

    def end(self) -> None:
        """Ends the process, with tables that may be open and work that may not be committed."""
        kinds = ["return", "return", "commit", "close", "exit", "raise", "_exit", "kill", "sigint", "abandon"]
        kind = self.rng.choice(kinds)
        code = {"exit": 7, "raise": UNCAUGHT, "_exit": 5, "kill": -signal.SIGKILL, "sigint": 130}.get(kind, 0)
        self.say("end", kind=kind, code=code)
        if kind == "abandon":  # a loop over a prefetch that is still referred to when the interpreter ends
            self.loop = iter(self.prefetched(3))
            next(self.loop)
            globals()["left_over"] = self.loop
        if kind in ("commit", "close"):
            self.commit()
        if kind == "close":
            self.tables.close()
        if kind == "exit":
            sys.exit(7)
        if kind == "raise":
            raise Boom
        if kind == "_exit":
            os._exit(5)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sigint":
            signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
            os.kill(os.getpid(), signal.SIGINT)

    # -- training ----------------------------------------------------------------------------

    def on_demand(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            turn = turn_of(self.seed, self.turn)
            losses = [self.forward(batch) for batch in turn.batches]
            self.update(losses)
            self.between()

    def prefetched(self, turns: int) -> Any:
        """A prefetch of the coming turns, over a generator or over workers of a DataLoader."""
        batches: Any = stream(self.seed, self.turn, turns)
        self.workers = False
        if not self.few and self.rng.random() < 0.1:
            data = Turns(self.seed, self.turn, turns)
            batches = DataLoader(data, batch_size=None, num_workers=2)
            self.workers = True
        inputs = {"items": lambda batch: batch.items, "pairs": lambda batch: batch.pairs}
        return tierstore.prefetch(batches, self.model, inputs=self.rng.choice([None, inputs]))

    def ahead(self) -> None:
        rng = self.rng
        end = rng.choice(["all", "break", "raise"])
        losses: list[torch.Tensor] = []
        begin, turns = self.turn, rng.randint(2, 12)
        leave = begin + rng.randrange(turns)
        try:
            for batch in self.prefetched(turns):
                losses.append(self.forward(batch))
                if not batch.last:
                    continue
                self.update(losses)
                losses = []
                if rng.random() < 0.5:
                    self.between()
                if end != "all" and self.turn > leave:
                    if end == "break":
                        break
                    raise Boom
        except Boom:
            pass

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch; a forward call that is interrupted is made again."""
        rng = self.rng
        if rng.random() < 0.1:  # other tensors than those that were handed out
            batch = Batch(*(v.clone() if isinstance(v, torch.Tensor) else v for v in vars(batch).values()))
        if rng.random() < 0.05:
            with torch.inference_mode():
                self.model(batch)
        while rng.random() < 0.15:
            if self.interrupted("forward", lambda: self.model(batch)):
                break
        return self.model(batch)

    def update(self, losses: list[torch.Tensor]) -> None:
        turn = turn_of(self.seed, self.turn)
        torch.stack(losses).sum().backward()
        overwrite(self.tables, turn)
        self.turn += 1
        self.left -= 1
        self.say("turn", turn=self.turn)

    # -- between updates ---------------------------------------------------------------------

    def between(self) -> None:
        operations: list[Callable[[], Any]] = [
            self.check,
            self.check,
            self.evaluate,
            self.commit,
            self.commit,
            self.commit_interrupted,
            self.read_interrupted,
            self.fork,
            self.tables.stats,
            self.tables.engine.commits,
            self.tables.engine.store.compact,
        ]
        operation = self.rng.choice(operations)
        self.left -= 1
        self.say(operation.__name__)
        operation()

    def check(self) -> None:
        self.say("digest", turn=self.turn, digest=digest(self.tables))

    def evaluate(self) -> None:
        batch = turn_of(self.seed, self.turn + 1).batches[0]
        with torch.no_grad():
            rows = self.model.items(batch.items)
        assert torch.equal(rows, self.tables["items"].rows(batch.items)), "eval and rows() differ"

    def commit(self) -> None:
        self.say("committing", turn=self.turn)
        self.tables.commit(extra={"turn": self.turn})
        self.say("committed", turn=self.turn)

    def commit_interrupted(self) -> None:
        """A commit that is interrupted is made or not made; the next one counts again."""
        self.say("committing", turn=self.turn)
        if self.interrupted("commit", lambda: self.tables.commit(extra={"turn": self.turn})):
            self.say("committed", turn=self.turn)

    def read_interrupted(self) -> None:
        self.interrupted("rows", lambda: cold_digest(self.tables))

    def interrupted(self, what: str, work: Callable[[], Any]) -> bool:
        """Whether ``work`` was done before an exception was raised in it from a signal handler."""
        done = False
        try:
            signal.setitimer(
                signal.ITIMER_REAL, self.rng.choice([2e-5, 2e-4, 2e-3]) * self.rng.random() + 1e-6
            )
            try:
                work()
                done = True
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            pass
        self.say("interrupted", call=what, done=done)
        return done

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise Interrupt

    # -- other processes ---------------------------------------------------------------------

    def fork(self) -> None:
        kind = self.rng.choice(["_exit", "touch", "exit", "linger"])
        if kind == "exit" and self.workers:
            return  # multiprocessing would end the parent's workers there
        self.say("fork", kind=kind)
        child = os.fork()
        if not child:
            self._be_child(kind)
        if kind == "linger":
            self.say("lingers", pid=child)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"the forked child that was to {kind} ended with {code}"

    def _be_child(self, kind: str) -> None:
        if kind == "exit":
            sys.exit(0)
        if kind == "linger":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LINGER_SECONDS)
            while True:
                signal.pause()
        if kind == "touch":
            batch = turn_of(self.seed, self.turn).batches[0]
            calls = [
                self.tables.stats,
                self.tables.commit,
                lambda: digest(self.tables),
                lambda: self.model(batch),
            ]
            for number, call in enumerate(calls):
                try:
                    call()
                except TierStoreError:
                    continue
                os._exit(10 + number)
        os._exit(0)


def serve(folder: Path) -> tuple[int, int, int] | None:
    """Forks a child per line; returns the child's life in the child, None at the end of the lines."""
    for line in sys.stdin:
        seed, life, steps = map(int, line.split())
        child = os.fork()
        if not child:
            return seed, life, steps
        print(_wait(child, folder, life), flush=True)
    return None


def _wait(child: int, folder: Path, life: int) -> str:
    """Return the exit code of a life, or ``hang`` if its journal has not grown for so many seconds. A busy
    machine may make a whole life take longer than that. Naps are counted, not the time, so that an attack may
    be stopped and go on (SIGSTOP, SIGCONT, or a laptop that sleeps)."""
    journal, size, naps = journal_of(folder, life), 0, 0
    while naps * NAP_SECONDS < HANG_SECONDS:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return str(os.waitstatus_to_exitcode(status))
        if journal.exists() and journal.stat().st_size > size:
            size, naps = journal.stat().st_size, 0
        time.sleep(NAP_SECONDS)
        naps += 1
    with (folder / f"life-{life}.log").open("a") as log:
        log.writelines(_threads(child))
    os.killpg(child, signal.SIGUSR1)  # the tracebacks of the life and its children go to its log
    time.sleep(1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hang"


def _threads(process: int) -> Iterator[str]:
    """Yield what each thread of a process does: its state, its time on a processor and off one, where it
    sleeps."""
    for task in sorted(Path(f"/proc/{process}/task").iterdir()):
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        times, sleeps = (task / "schedstat").read_text().split(), (task / "wchan").read_text()
        yield (
            f"thread {task.name}: {state}, {int(times[0]) / 1e9:.1f} s on a processor, "
            f"{int(times[1]) / 1e9:.1f} s waiting for one, {sleeps}\n"
        )


if __name__ == "__main__":
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    finish_imports()  # what is imported and compiled now need not be in every life
    for policy in POLICIES:
        cache_policies.get(policy).compile(1)
    gc.freeze()  # else every life would copy and search all of these objects when it ends
    told = serve(root)
    if told is not None:
        output = os.open(root / f"life-{told[1]}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.setpgid(0, 0)
        faulthandler.register(signal.SIGUSR1)
        logging.getLogger("tierstore").setLevel(logging.ERROR)
        Life(root, *told).run()
