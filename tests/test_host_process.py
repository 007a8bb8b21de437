"""A library changes nothing of the process that uses it, and gives back what a peak took."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import warm

HEADER = """
import ctypes, gc, logging, os, resource, signal, sys, threading, warnings
import numpy as np, torch
torch.set_num_threads(1)

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
"""

MALLOC = """
class Malloc(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Malloc
"""

SETTINGS = """
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def mapped_alone(size):
    before = libc.mallinfo2().hblkhd
    block = libc.malloc(size)
    taken = libc.mallinfo2().hblkhd - before
    libc.free(block)
    return taken > 0

def settings():
    return {
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "tiny": float(torch.tensor([1e-39]) * 1),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "logging": (list(logging.root.handlers), logging.root.level),
        "numpy": np.geterr(),
        "switch": sys.getswitchinterval(),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if "RLIMIT" in n],
        "affinity": os.sched_getaffinity(0),
        "umask": (os.umask(0o22), os.umask(0o22))[1],
        "collector": (gc.isenabled(), gc.get_threshold()),
    }

before = settings()
import tierstore
config, sgd = tierstore.TierConfig(hbm="128KiB", ssd="1GiB"), tierstore.optim.SGD(lr=0.1)
with tierstore.TieredEmbedding(5000, 16, config=config, optimizer=sgd) as table:
    for _ in range(5):
        table(torch.randint(5000, (600,))).sum().backward()
after = settings()
assert before == after, {k: (before[k], after[k]) for k in before if before[k] != after[k]}
# glibc raises the size from which blocks are mapped on their own when such a block is freed, as long as
# nobody has fixed that size.
size = 24 << 20
mapped_alone(size)
assert not mapped_alone(size), "malloc does not decide for itself any more"
"""


def run(script: str, python: str = sys.executable) -> None:
    done = subprocess.run([python, "-c", HEADER + script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_and_opening_change_no_setting_of_the_process() -> None:
    run(MALLOC + SETTINGS)


def test_rows_on_their_way_are_given_back() -> None:
    run(
        """
import tierstore
from tierstore import TierConfig, TieredEmbedding
dim, count = 64, 400_000
config, sgd = TierConfig(hbm="4MiB", ssd="2GiB", engine="native"), tierstore.optim.SGD(lr=0.1)
table = TieredEmbedding(count, dim, config=config, optimizer=sgd)
def load(ids):
    table.load_rows(ids, ids[:, None].expand(-1, dim).float().contiguous())
for begin in range(0, count, 40_000):
    load(torch.arange(begin, begin + 40_000))
small = torch.randint(count, (2000,))
table(small).sum().backward()
held = lambda: table.stats()["memory"]["buffers"]
assert held() < 32 << 20, held()
before = status("VmRSS")
out = table.rows(torch.arange(count))
assert (out[:, 3] == torch.arange(count)).sum() >= count - 2000
size = out.nbytes
assert status("VmHWM") < before + size + (64 << 20), (status("VmHWM") - before) >> 20
del out
gc.collect()
assert held() < 32 << 20, held()
assert status("VmRSS") < before + (32 << 20), (status("VmRSS") - before) >> 20
with torch.no_grad():
    out = table(torch.arange(count))
del out
assert held() < 32 << 20, held()
# One large batch needs room for all of its rows; it is given back while small ones follow.
table(torch.arange(200_000)).sum().backward()
assert held() > 32 << 20, held()
for _ in range(40):
    table(torch.randint(count, (2000,))).sum().backward()
assert held() < 16 << 20, held()
table.commit() if table.engine.config.path else None
table.close()
"""
    )


@pytest.mark.parametrize("ids", ["torch.arange(2_000_000)", "torch.arange(2_000_000) * 7"])
def test_what_finds_repeated_ids_is_given_back(ids: str) -> None:
    """In a table of as many rows each id has a place, in a larger one a hash table has."""
    run(
        f"""
import tierstore
config, sgd = tierstore.TierConfig(hbm="1MiB", ssd="2GiB"), tierstore.optim.SGD(lr=0.1)
large = {ids}
table = tierstore.TieredEmbedding(int(large.max()) + 1, 1, config=config, optimizer=sgd)
small = torch.arange(100)
def lookup(ids):
    with torch.no_grad():
        table(ids)
for _ in range(40):
    lookup(small)
before = status("VmRSS")
lookup(large)
for _ in range(40):
    lookup(small)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what torch's own temporaries left in the heap does not count here
assert status("VmRSS") < before + (60 << 20), (status("VmRSS") - before) >> 20
"""
    )


def test_reading_a_part_of_rows_takes_no_room_for_the_rest() -> None:
    run(
        """
import tierstore
dim, count = 32, 500_000
config, adam = tierstore.TierConfig(hbm="4MiB", ssd="1GiB"), tierstore.optim.Adam(lr=0.1)
with tierstore.TieredEmbedding(count, dim, config=config, optimizer=adam) as table:
    table(torch.arange(100)).sum().backward()
    ids = torch.arange(count)
    def peak(read):
        before = status("VmRSS")
        size = sum(part.nbytes for part in read())
        more = status("VmHWM") - before - size
        assert more < 48 << 20, (more >> 20, size >> 20)
    peak(lambda: [table.rows(ids)])
    peak(lambda: table.optimizer_rows(ids).values())
"""
    )


@pytest.mark.parametrize(
    ("module", "shape"),
    [("TieredEmbedding", (-1,)), ("TieredEmbeddingBag", (-1, 1)), ("TieredEmbeddingBag", (-1, 4))],
)
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_kept_gradients_lie_outside_of_mallocs_heap(module: str, shape: tuple[int, ...], mode: str) -> None:
    """There, between the temporaries of later passes, they would keep the pages of these."""
    run(
        MALLOC
        + f"""
import tierstore
count, options = 20_000, dict() if "{module}" == "TieredEmbedding" else dict(mode="{mode}")
config, sgd = tierstore.TierConfig(hbm="all"), tierstore.optim.SGD(lr=0.1)
with tierstore.{module}(5 * count, 64, config=config, optimizer=sgd, **options) as table:
    def step(number):
        ids = torch.arange(number * count, (number + 1) * count).view{shape}
        (table(ids) ** 2).sum().backward()
    def allocated():
        gc.collect()
        found = libc.mallinfo2()
        return found.uordblks + found.hblkhd
    step(0)
    with tierstore.accumulate(table) as kept:
        before = allocated()
        for number in range(5):
            step(number)
        taken, size = allocated() - before, kept.kept_bytes
        assert size > 6_000_000, size
        assert taken < size / 8, (taken, size)
""",
        warm.python(),  # what was allocated before does not count
    )


LIMITED = """
import tierstore
from tierstore import TierConfig, optim
from tierstore.cache.engine import Engine, Table
from tierstore.errors import ConfigError, TierFullError
from tierstore.initializers import uniform
used = status("VmSize")
def open_tables(hbm, dims, rows, more):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        tables = [Table(f"t{i}", rows, dim, uniform(-1, 1)) for i, dim in enumerate(dims)]
        config = TierConfig(hbm=hbm, ssd=0 if hbm == "all" else "1GiB", engine="memory")
        return Engine(tables, config, optim.SGD(lr=0.1))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_wide_rows_need_no_more_address_space_than_they_can_fill() -> None:
    run(
        LIMITED
        + """
dims = [60_000 + 16 * i for i in range(8)]  # eight row layouts
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
tables = [Table(f"t{d}", 10**6, d, uniform(-1, 1)) for d in dims]
Engine(tables, TierConfig(hbm="64MiB"), optim.SGD(lr=0.1)).close()
for hbm in ("64MiB", "all"):
    open_tables(hbm, dims, 100, 2 << 30).close()
""",
        warm.python(),
    )


def test_refused_address_space_is_an_error_with_the_numbers() -> None:
    run(
        LIMITED
        + """
try:
    open_tables("all", [64] * 1 + [128], 10**9, 1 << 28)
except ConfigError as error:
    text = str(error)
    assert "ulimit -v" in text and "bytes of address space" in text, text
else:
    raise SystemExit("no error")
""",
        warm.python(),
    )


@pytest.mark.parametrize("past", [0, 1])
def test_a_batch_that_exceeds_the_overflow_slots_changes_nothing(past: int) -> None:
    run(
        f"""
from tierstore.cache.tiers import memory
from tierstore import TierConfig, TieredEmbedding
from tierstore.errors import TierFullError
from tierstore.optim import SGD
memory.overflow_rows = lambda row_bytes: 64
sgd = SGD(lr=0.1)
config = TierConfig(hbm="4KiB", ssd="1GiB", engine="memory")
table = TieredEmbedding(5000, 16, config=config, optimizer=sgd)
other = TieredEmbedding(5000, 16, config=TierConfig(hbm="all"), optimizer=sgd)
slots = table.stats()["groups"]["dim16"]["slots"]
table(torch.arange(10)).sum().backward()
other(torch.arange(10)).sum().backward()
ids = torch.arange(slots + 64 + {past})
if {past}:
    try:
        table(ids)
    except TierFullError as error:
        assert "address space for 64" in str(error), error
    else:
        raise SystemExit("no error")
else:
    table(ids).sum().backward()
    other(ids).sum().backward()
for _ in range(20):
    ids = torch.randint(5000, (40,))
    table(ids).sum().backward()
    other(ids).sum().backward()
assert torch.equal(table.rows(torch.arange(5000)), other.rows(torch.arange(5000)))
""",
        warm.python(),
    )
