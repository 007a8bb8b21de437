"""A training script that ends as its first argument says; see ``test_ends_of_processes.py``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from typing import Any

import torch

import tierstore
from tierstore import TieredEmbeddingBag

HOW, WHERE, FOLDER = sys.argv[1:4]
FULL = HOW == "full"  # goes on until the store is
ROWS, DIMS = (3_000_000 if FULL else 200_000), (16, 8)
STEP = 10_000 if FULL else 12
torch.set_num_threads(1)


def tables(number: int, dim: int) -> TieredEmbeddingBag:
    path, ssd = os.path.join(FOLDER, str(number)), "64MiB" if FULL else tierstore.TierConfig.ssd
    config = tierstore.TierConfig(hbm="2MiB", path=path, ssd=ssd)
    return TieredEmbeddingBag(ROWS, dim, config=config, optimizer=tierstore.optim.SGD(lr=0.1))


def batches() -> Any:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100_000):
        yield torch.randint(0, ROWS, (1024, 10), generator=generator)


def leave(batch: Any) -> None:
    if HOW == "exception":
        raise ValueError("the user's own")
    if HOW == "exit":
        sys.exit(3)
    if HOW == "ctrl-c":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background lack
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
    if HOW == "exit-in-a-thread":
        thread = threading.Thread(target=lambda: sys.exit(9))
        thread.start()
        thread.join()
    if HOW == "thread-goes-on":
        threading.Thread(target=lambda: [train(batch) for _ in range(20)]).start()
    if HOW == "forked-child":
        child = os.fork()
        if child == 0:
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    if HOW == "cycle":
        knot: list[Any] = [iter_of_all, modules]
        knot.append(knot)
        gc.disable()
    if HOW == "closed":
        for module in modules:
            module.close()


def train(batch: Any) -> None:
    sum(module(batch).sum() for module in modules).backward()  # type: ignore[union-attr]


modules = [tables(number, dim) for number, dim in enumerate(DIMS)]
iter_of_all: Any = (
    batches() if WHERE == "no-prefetch" else iter(tierstore.prefetch(batches(), modules, window=8))
)
step = 0
for step, batch in enumerate(iter_of_all):
    if step < STEP:
        train(batch)
    elif WHERE == "pulled":
        leave(batch)
        break
    elif WHERE == "in-forward":
        outputs = [modules[0](batch)]
        leave(batch)
        break
    else:
        train(batch)
        leave(batch)
        break
print("end of the script", step)
