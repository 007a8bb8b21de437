"""Parts of ``tierstore bench gpu`` about rows on the GPU: bits, kernels, and the link to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tierstore.cache.device import HOST, Bags, InitialValues, LookupArgs, UpdateArgs, build_csr
from tierstore.cuda.streams import Stream
from tierstore.optim import RowWiseAdagrad

from ._gpu_sizes import Figures, Sizes, fitting

REPEAT = 10
_IDS_PER_BAG = 20
OPTIMIZER = RowWiseAdagrad(lr=0.01)
_AHEAD_CYCLES = 1_000_000_000  # some 0.5 s, in which the host gives all calls of a round


def wall_seconds(call: Callable[[], object], finish: Callable[[], object]) -> float:
    """Return the seconds of one call, of several between two waits for the GPU."""
    call()
    finish()
    begin = time.perf_counter()
    for _ in range(REPEAT):
        call()
    finish()
    return (time.perf_counter() - begin) / REPEAT


def kernel_seconds(call: Callable[[], object], finish: Callable[[], object]) -> float:
    """Return the seconds that the current stream takes for one call.

    The stream is held up until all calls are given, so the host's part of them does not count. The first of
    two rounds makes the memory that so many calls need at once.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        torch.cuda._sleep(_AHEAD_CYCLES)
        begin.record()
        for _ in range(REPEAT):
            call()
        end.record()
        finish()
        end.synchronize()  # finish() has waited for our kernels alone
    return float(begin.elapsed_time(end)) / 1e3 / REPEAT


def moving_seconds(call: Callable[[], object], device: Any, names: Sequence[Stream]) -> float:
    """Return the seconds that streams of the device take for one call, from the begin of the first to the end
    of the last; as :func:`kernel_seconds`, without the host's part."""
    import torch

    streams = [torch.cuda.ExternalStream(device.streams.handle(name)) for name in names]
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in streams] for _ in range(2))
    for _ in range(2):
        for stream, begin in zip(streams, begins, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_AHEAD_CYCLES)
            begin.record(stream)
        for _ in range(REPEAT):
            call()
        for stream, end in zip(streams, ends, strict=True):
            end.record(stream)
        device.synchronize()
        for end in ends:
            end.synchronize()
    return max(float(begin.elapsed_time(end)) for begin in begins for end in ends) / 1e3 / REPEAT


class Arena:
    """Rows on the GPU with initial values, in use in random order; a context manager."""

    def __init__(self, sizes: Sizes) -> None:
        from tierstore.modules import open_cuda

        self.device: Any = open_cuda(None)
        self.sizes, self.row_bytes = sizes, sizes.row_bytes
        self.count = min(sizes.rows, self.device.memory()[0] // 4 // self.row_bytes)
        self.rows = self.device.allocate(self.count, self.row_bytes, dim=sizes.dim)
        self.rows.commit(self.count)
        self.fill(self.rows)
        self.random = np.random.default_rng(0)

    def fill(self, rows: Any) -> None:
        one = np.ones(1, np.float32)
        values = InitialValues(
            dim=self.sizes.dim, state_floats=1, state_value=0.0, kinds=np.full(1, 2, np.uint8), first=-one,
            second=one, seeds=np.zeros(1, np.uint64),
        )  # fmt: skip
        rows.initialise(values, None, np.arange(self.count, dtype=np.uint64))

    def slots(self, n: int) -> Any:
        return self.random.permutation(self.count)[:n].astype(np.int32)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize()
        self.device.close()


def opening(sizes: Sizes) -> Figures:
    """Open the GPU, compile what every row needs, and choose tables that fit."""
    import psutil
    import torch

    from tierstore.cache.machine import host_memory
    from tierstore.modules import open_cuda

    begin = time.perf_counter()
    device = open_cuda(None)
    free, whole = device.memory()
    yield {
        "open_seconds": time.perf_counter() - begin,
        "gpu": str(torch.cuda.get_device_name()),
        "cuda_of_torch": torch.version.cuda,
        "driver": device.streams.driver.version,
        "free_bytes": free,
        "memory_bytes": whole,
    }
    device.close()
    host = sizes.host_gib << 30 or min(psutil.virtual_memory().available, host_memory())
    yield {"host_free_bytes": host, **fitting(sizes, free, host)}


def bits(sizes: Sizes) -> Figures:
    """Compare lookups and updates of random batches with the CPU's, bit for bit."""
    import torch

    with Arena(sizes) as arena:
        n = min(arena.count, 4096)
        host = np.zeros((arena.count, arena.row_bytes), np.uint8)
        twin = HOST.load(host)
        arena.fill(twin)
        same = 0
        for turn in range(REPEAT):
            slots, inverse = arena.slots(n), arena.random.integers(0, n, 4 * n).astype(np.int32)
            args = LookupArgs(dim=sizes.dim, slots=slots, inverse=inverse)
            out = torch.empty(4 * n, sizes.dim, device="cuda")
            expected = torch.empty(4 * n, sizes.dim)
            arena.rows.lookup_rows(args, out.data_ptr(), sizes.dim)
            twin.lookup_rows(args, expected.data_ptr(), sizes.dim)
            start, positions = build_csr(inverse, n)
            update = UpdateArgs(
                dim=sizes.dim, slots=slots, csr_start=start, csr_positions=positions,
                step=OPTIMIZER.step_args(),
            )  # fmt: skip
            arena.rows.update_rows(update, out.data_ptr(), sizes.dim)
            twin.update_rows(update, expected.data_ptr(), sizes.dim)
            mine = np.zeros((n, arena.row_bytes), np.uint8)
            arena.rows.copy_out(slots, mine)
            same += bool(torch.equal(out.cpu(), expected)) + bool((mine == host[slots]).all())
            yield {"checks": 2 * (turn + 1), "equal_to_the_cpu": same}


def copies(sizes: Sizes) -> dict[str, float]:
    """Measure the ceilings: bytes per second that torch copies on the GPU, to it, from it, and both ways."""
    import torch

    size = min(sizes.rows * sizes.dim * 4, 1 << 30)
    here, there = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    host, other = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    side, finish = torch.cuda.Stream(), torch.cuda.synchronize

    def up() -> None:
        here.copy_(host, non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(side):
            other.copy_(there, non_blocking=True)

    rates = {"to_gpu": size / wall_seconds(up, finish), "from_gpu": size / wall_seconds(down, finish)}
    rates["both_ways"] = 2 * size / wall_seconds(lambda: (up(), down()), finish)
    rates["copy"] = 2 * size / wall_seconds(lambda: there.copy_(here), finish)
    return {f"{name}_gb_per_s": rate / 1e9 for name, rate in rates.items()}


def kernels(sizes: Sizes, seconds: Callable[..., float] = kernel_seconds) -> Figures:
    """Measure gather, pooled lookup and update in bytes per second of the GPU's memory."""
    import torch

    ceiling = copies(sizes)
    yield dict(ceiling)
    with Arena(sizes) as arena:
        rows, dim, n = arena.rows, sizes.dim, min(arena.count, 16 * sizes.batch_size)
        slots, inverse = arena.slots(n), arena.random.permutation(n).astype(np.int32)
        out = torch.empty(n, dim, device="cuda")
        gather = LookupArgs(dim=dim, slots=slots, inverse=inverse)
        bags, pooled = _bags(n // _IDS_PER_BAG, dim), torch.empty(n // _IDS_PER_BAG, dim, device="cuda")
        whole = LookupArgs(dim=dim, slots=slots, inverse=inverse[: n // _IDS_PER_BAG * _IDS_PER_BAG])
        start, positions = build_csr(inverse, n)
        update = UpdateArgs(
            dim=dim, slots=slots, csr_start=start, csr_positions=positions, step=OPTIMIZER.step_args()
        )
        finish, size = arena.device.synchronize, 4 * dim * n
        at, pooled_at = out.data_ptr(), pooled.data_ptr()
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "gather": (2 * size, lambda: rows.lookup_rows(gather, at, dim)),
            "pooled": (size + size // _IDS_PER_BAG, lambda: rows.lookup_pooled(whole, bags, pooled_at)),
            "update": (size + 2 * n * arena.row_bytes, lambda: rows.update_rows(update, at, dim)),
        }
        for name, (moved, call) in calls.items():
            rate = moved / seconds(call, finish) / 1e9
            yield {f"{name}_gb_per_s": rate, f"ratio.{name}_vs_copy": rate / ceiling["copy_gb_per_s"]}


def _bags(count: int, dim: int) -> Bags:
    return Bags(
        offsets=np.arange(count + 1, dtype=np.int64) * _IDS_PER_BAG, bag_start=np.array([0, count]),
        out_offset=np.zeros(1, np.int64), out_stride=np.full(1, dim), modes=np.zeros(1, np.uint8),
    )  # fmt: skip


def link(sizes: Sizes) -> Figures:
    """Measure rows that move between ``hbm`` and ``uvm``: each way, and both at once."""
    ceiling = copies(sizes)
    yield dict(ceiling)
    with Arena(sizes) as arena:
        n = min(arena.count // 2, 4 * sizes.batch_size)
        size, device = n * arena.row_bytes, arena.device
        for kind in ("pinned", "managed"):
            uvm = device.uvm(kind).allocate(arena.count, arena.row_bytes)
            uvm.commit(arena.count)
            mine, others = np.split(arena.slots(2 * n), 2)

            def up(uvm: Any = uvm, mine: Any = mine) -> None:
                arena.rows.copy_rows(mine, uvm, mine)

            def down(uvm: Any = uvm, others: Any = others) -> None:
                uvm.copy_rows(others, arena.rows, others)

            both = moving_seconds(lambda: (up(), down()), device, (Stream.UP, Stream.DOWN))
            both = 2 * size / both / 1e9
            yield {
                f"{kind}.up_gb_per_s": size / moving_seconds(up, device, (Stream.UP,)) / 1e9,
                f"{kind}.down_gb_per_s": size / moving_seconds(down, device, (Stream.DOWN,)) / 1e9,
                f"{kind}.both_gb_per_s": both,
                f"ratio.{kind}_both_vs_link": both / ceiling["both_ways_gb_per_s"],
            }
