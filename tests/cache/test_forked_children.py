"""A forked child has no copy of the memory tiers, and is told so wherever it uses tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import warm

HEADER = """
import gc, os, sys, threading
import torch
torch.set_num_threads(1)
import tierstore
from tierstore import TierConfig, TieredEmbedding
from tierstore.errors import ClosedError
from tierstore.optim import SGD

def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"child ended with {status}"

def refused(work):
    try:
        work()
    except ClosedError as error:
        assert "forked child" in str(error), error
    else:
        raise AssertionError("no error")
"""


def run(script: str, *arguments: str, python: str = sys.executable) -> None:
    command = [python, "-c", HEADER + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("hbm", ["all", "256KiB"])
def test_every_entry_says_that_tables_are_of_another_process(hbm: str) -> None:
    run(
        """
hbm = sys.argv[1]
ssd = {} if hbm == "all" else {"ssd": "1GiB", "engine": "memory"}
table = TieredEmbedding(20_000, 16, config=TierConfig(hbm=hbm, **ssd), optimizer=SGD(lr=0.1))
ids = torch.randint(20_000, (3000,))
table(ids).sum().backward()
waiting = table(ids).sum()
rows = table.rows(ids)
calls = {
    "forward": lambda: table(ids),
    "backward": lambda: waiting.backward(),
    "eval": lambda: table.eval()(ids),
    "rows": lambda: table.rows(ids),
    "optimizer_rows": lambda: table.optimizer_rows(ids),
    "load_rows": lambda: table.load_rows(torch.tensor([1]), torch.zeros(1, 16)),
    "touched": lambda: list(table.touched_ids()),
    "reset": lambda: table.reset_parameters(),
    "stats": lambda: table.stats(),
    "reset_stats": lambda: table.reset_stats(),
    "curves": lambda: table.table_curves(),
    "flush": lambda: table.flush(),
    "commit": lambda: table.commit(),
    "commits": lambda: table.engine.commits(),
    "extra": lambda: table.engine.committed_extra(),
}
for name, call in calls.items():
    in_child(lambda: refused(call))

def ends():
    global table, waiting
    with table:
        pass
    table.close()
    del table, waiting
    calls.clear()
    gc.collect()
in_child(ends)

# Another thread has the locks while the process forks.
group = table.engine.groups[0]
held, done = threading.Event(), threading.Event()
def hold():
    with group.residency_lock, group.order._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
for name, call in calls.items():
    in_child(lambda: refused(call))
in_child(ends)
done.set()
thread.join()

assert torch.equal(table.rows(ids), rows)
waiting.backward()
assert not torch.equal(table.rows(ids), rows)
table.close()
""",
        hbm,
        python=warm.python(),
    )


def test_workers_of_a_data_loader_may_refer_to_a_module() -> None:
    run(
        """
class Data(torch.utils.data.Dataset):
    def __init__(self, table):
        self.table = table
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 63 and self.touch:
            self.table.rows(torch.tensor([index]))
        return index
for touch in (False, True):
    table = TieredEmbedding(20_000, 16, config=TierConfig(hbm="256KiB", ssd="1GiB"), optimizer=SGD(lr=0.1))
    data = Data(table)
    data.touch = touch
    loader = torch.utils.data.DataLoader(data, 4, num_workers=2, multiprocessing_context="fork")
    for epoch in range(2):
        try:
            seen = 0
            for batch in tierstore.prefetch(loader, table) if epoch else loader:
                table(batch).sum().backward()
                seen += len(batch)
            assert seen == 64 and not touch
        except Exception as error:
            assert touch and "forked child" in str(error), error
    table.rows(torch.arange(100))
    table.close()
""",
        python=warm.python(),
    )


def test_children_take_no_copy_of_what_training_changes() -> None:
    run(
        """

def private(pid):
    total = 0
    for line in open(f"/proc/{pid}/smaps_rollup"):
        if line.startswith(("Private_Dirty", "Private_Clean")):
            total += int(line.split()[1]) << 10
    return total
table = TieredEmbedding(800_000, 64, config=TierConfig(hbm="all"), optimizer=SGD(lr=0.1))
for begin in range(0, 800_000, 20_000):
    table(torch.arange(begin, begin + 20_000)).sum().backward()
size = table.stats()["memory"]["hbm"]
assert size > 200 << 20, size
quiet, talk = os.pipe()
child = os.fork()
if child == 0:
    os.close(talk)
    os.read(quiet, 1)
    os._exit(0)
for begin in range(0, 800_000, 20_000):
    table(torch.arange(begin, begin + 20_000)).sum().backward()
# What the parent has written since is the child's alone now, if the child had it.
assert private(child) < size // 2, (private(child) >> 20, size >> 20)
os.close(talk)
os.waitpid(child, 0)
table.close()
"""
    )


def test_memory_freed_in_a_child_is_not_what_lies_there_now() -> None:
    run(
        """
import mmap, numpy as np
table = TieredEmbedding(200_000, 64, config=TierConfig(hbm="all"), optimizer=SGD(lr=0.1))
table(torch.arange(200_000)).sum().backward()
def churn():
    global table
    blocks = [np.full(32 << 20, i, np.uint8) for i in range(8)]  # fill the gaps that the tiers left
    more = [mmap.mmap(-1, 2 << 20) for _ in range(200)]
    del table
    gc.collect()
    assert all(int(block[::4096].sum()) == i * len(block[::4096]) for i, block in enumerate(blocks))
    for piece in more:
        piece[:8] = b"12345678"
    config = TierConfig(hbm="64KiB", ssd="1GiB", engine="memory")
    other = TieredEmbedding(1000, 16, config=config, optimizer=SGD(lr=0.1))
    other(torch.arange(1000)).sum().backward()
    other.close()
in_child(churn)
table.close()
"""
    )
