"""Objects end with the process, also where Ctrl-C interrupts the wait for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LAST_REFERENCE = """
import gc
import threading
import time
import weakref
import torch
import tierstore
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.store.native import NativeStore

work, close = ReadAhead._work, NativeStore.close
dropped, closing = threading.Event(), threading.Event()


def end_last(ahead):
    work(ahead)
    dropped.wait()


def close_slowly(store):
    closing.set()
    time.sleep(0.5)
    close(store)
    print("the store is closed by", threading.current_thread().name, flush=True)


ReadAhead._work, NativeStore.close = end_last, close_slowly
config = tierstore.TierConfig(hbm="64KiB", ssd="64MiB")
table = tierstore.TieredEmbeddingBag(20_000, 16, config=config, optimizer=tierstore.optim.SGD(lr=0.1))
table.load_rows(torch.arange(20_000), torch.zeros(20_000, 16))
batches = [torch.randint(0, 20_000, (64, 4)) for _ in range(20)]
for batch in tierstore.prefetch(batches, table, window=8):
    table(batch).sum().backward()
engine = weakref.ref(table.engine)
del table
gc.collect()
dropped.set()
assert closing.wait(60) and engine() is None
print("end of the script", flush=True)
"""

SCRIPT = """
import sys
from tierstore.cache.at_exit import end_at_exit


class Ending:
    def __init__(self, name, *errors):
        self.name, self.errors = name, list(errors)

    def end_at_exit(self):
        if self.errors:
            raise self.errors.pop(0)
        print(self.name, "has ended")


interrupts = [KeyboardInterrupt()] * int(sys.argv[1])
endings = [Ending("first", *interrupts), Ending("second", OSError()), Ending("third", KeyboardInterrupt())]
for ending in endings:
    end_at_exit(ending)
"""


@pytest.mark.parametrize(("interrupts", "code"), [(1, 0), (2, 130)])
def test_ctrl_c_ends_no_wait_for_good(interrupts: int, code: int) -> None:
    """Another error does: the object would raise it again. Ctrl-C in the second wait ends the process."""
    command = [sys.executable, "-c", SCRIPT, str(interrupts)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stdout == "third has ended\n" + (interrupts == 1) * "first has ended\n"
    assert ended.stderr.count("Ctrl-C once more ends the process at once") == 2
    assert ended.stderr.count("did not end as it should: OSError()") == 1


def test_threads_that_have_the_last_reference_to_a_store_are_waited_for() -> None:
    """The thread would come back from closing the store while the interpreter ends, which aborts."""
    command = [sys.executable, "-c", LAST_REFERENCE]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == [
        "end of the script",
        "the store is closed by tierstore-read-ahead",
        "",
    ]
