"""The parts of ``tierstore bench gpu``: each returns its figures, and runs in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tierstore import _core
from tierstore.row_format import RowFormat

_REPEAT = 10
_HOTNESS = 20
_STEP = {"kind": 1, "lr": 0.01, "eps": 1e-8}  # row-wise Adagrad


@dataclass(frozen=True)
class Sizes:
    """Rows of the arenas and their dimension; examples of a batch, rows of the largest table, steps of a
    training."""

    rows: int = 1 << 21
    dim: int = 64
    batch_size: int = 65_536
    max_rows: int = 40_000_000
    steps: int = 60


@dataclass(frozen=True)
class Part:
    """A part: what it measures, the seconds that it may take, how many checks of bits it makes."""

    summary: str
    seconds: int
    run: Callable[[Sizes], dict[str, Any]]
    checks: int = 0


def _seconds(call: Callable[[], object], finish: Callable[[], object]) -> float:
    """Return the seconds of one call, of several between two waits for the GPU."""
    call()
    finish()
    begin = time.perf_counter()
    for _ in range(_REPEAT):
        call()
    finish()
    return (time.perf_counter() - begin) / _REPEAT


def _kernel_seconds(call: Callable[[], object], finish: Callable[[], object]) -> float:
    """Return the seconds of all kernels of one call on the GPU, as the profiler of torch sees them."""
    from torch.profiler import ProfilerActivity, profile

    call()
    finish()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_REPEAT):
            call()
        finish()
    times = [e.device_time_total for e in found.key_averages() if "emcpy" not in e.key]
    return sum(times) / 1e6 / _REPEAT


class _Arena:
    """Rows on the GPU with initial values, in use in random order; a context manager."""

    def __init__(self, sizes: Sizes) -> None:
        from tierstore.modules import open_cuda

        self.device: Any = open_cuda(None)
        self.sizes, self.row_bytes = sizes, RowFormat().row_bytes(sizes.dim, 1)
        self.rows = self.device.allocate(sizes.rows, self.row_bytes)
        self.rows.commit(sizes.rows)
        self.fill(self.rows)
        self.random = np.random.default_rng(0)

    def fill(self, rows: Any) -> None:
        one = np.ones(1, np.float32)
        values = _core.InitialValues(
            dim=self.sizes.dim, state_floats=1, state_value=0.0, kinds=np.full(1, 2, np.uint8), first=-one,
            second=one, seeds=np.zeros(1, np.uint64),
        )  # fmt: skip
        rows.initialise(values, None, np.arange(self.sizes.rows, dtype=np.uint64))

    def slots(self, n: int) -> Any:
        return self.random.permutation(self.sizes.rows)[:n].astype(np.int32)

    def __enter__(self) -> _Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize()
        self.device.close()


def bits(sizes: Sizes) -> dict[str, Any]:
    """Compare lookups and updates of random batches with the CPU's, bit for bit."""
    import torch

    with _Arena(sizes) as arena:
        n = min(sizes.rows, 4096)
        host = np.zeros((sizes.rows, arena.row_bytes), np.uint8)
        twin = _core.HostRows.view(host)
        arena.fill(twin)
        same = 0
        for _ in range(_REPEAT):
            slots, inverse = arena.slots(n), arena.random.integers(0, n, 4 * n).astype(np.int32)
            args = _core.LookupArgs(dim=sizes.dim, slots=slots, inverse=inverse)
            out = torch.empty(4 * n, sizes.dim, device="cuda")
            expected = torch.empty(4 * n, sizes.dim)
            arena.rows.lookup_rows(args, out.data_ptr(), sizes.dim)
            twin.lookup_rows(args, expected.data_ptr(), sizes.dim)
            start, positions = _core.build_csr(inverse, n)
            update = _core.UpdateArgs(
                dim=sizes.dim, slots=slots, csr_start=start, csr_positions=positions,
                step=_core.OptimizerStep(**_STEP),
            )  # fmt: skip
            arena.rows.update_rows(update, out.data_ptr(), sizes.dim)
            twin.update_rows(update, expected.data_ptr(), sizes.dim)
            mine = np.zeros((n, arena.row_bytes), np.uint8)
            arena.rows.copy_out(slots, mine)
            same += bool(torch.equal(out.cpu(), expected)) + bool((mine == host[slots]).all())
    return {"checks": 2 * _REPEAT, "equal_to_the_cpu": same}


def copies(sizes: Sizes) -> dict[str, Any]:
    """Measure the ceilings: bytes per second that torch copies on the GPU, to it and from it."""
    import torch

    size = sizes.rows * sizes.dim * 4
    here = torch.empty(size, dtype=torch.uint8, device="cuda")
    there, host = torch.empty_like(here), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    finish = torch.cuda.synchronize
    return {
        "copy_gb_per_s": 2 * size / _seconds(lambda: there.copy_(here), finish) / 1e9,
        "to_gpu_gb_per_s": size / _seconds(lambda: here.copy_(host, non_blocking=True), finish) / 1e9,
        "from_gpu_gb_per_s": size / _seconds(lambda: host.copy_(here, non_blocking=True), finish) / 1e9,
    }


def kernels(sizes: Sizes, seconds: Callable[..., float] = _kernel_seconds) -> dict[str, Any]:
    """Measure gather, pooled lookup and update in bytes per second of the GPU's memory."""
    import torch

    with _Arena(sizes) as arena:
        rows, dim, n = arena.rows, sizes.dim, min(sizes.rows, 6 * sizes.batch_size)
        slots, inverse = arena.slots(n), arena.random.permutation(n).astype(np.int32)
        out = torch.empty(n, dim, device="cuda")
        gather = _core.LookupArgs(dim=dim, slots=slots, inverse=inverse)
        bags, pooled = _bags(n // _HOTNESS, dim), torch.empty(n // _HOTNESS, dim, device="cuda")
        whole = _core.LookupArgs(dim=dim, slots=slots, inverse=inverse[: n // _HOTNESS * _HOTNESS])
        start, positions = _core.build_csr(inverse, n)
        update = _core.UpdateArgs(
            dim=dim, slots=slots, csr_start=start, csr_positions=positions, step=_core.OptimizerStep(**_STEP)
        )
        finish, size = arena.device.synchronize, 4 * dim * n
        at, pooled_at = out.data_ptr(), pooled.data_ptr()
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "gather": (2 * size, lambda: rows.lookup_rows(gather, at, dim)),
            "pooled": (size + size // _HOTNESS, lambda: rows.lookup_pooled(whole, bags, pooled_at)),
            "update": (size + 2 * n * arena.row_bytes, lambda: rows.update_rows(update, at, dim)),
        }
        rates = {name: moved / seconds(call, finish) / 1e9 for name, (moved, call) in calls.items()}
    figures: dict[str, Any] = {f"{name}_gb_per_s": rate for name, rate in rates.items()}
    ceiling = copies(sizes)["copy_gb_per_s"]
    return {**figures, **{f"ratio.{name}": rate / ceiling for name, rate in rates.items()}}


def _bags(count: int, dim: int) -> _core.Bags:
    return _core.Bags(
        offsets=np.arange(count + 1, dtype=np.int64) * _HOTNESS, bag_start=np.array([0, count]),
        out_offset=np.zeros(1, np.int64), out_stride=np.full(1, dim), modes=np.zeros(1, np.uint8),
    )  # fmt: skip


def link(sizes: Sizes) -> dict[str, Any]:
    """Measure rows that move between ``hbm`` and ``uvm``: each way, and both at once."""
    with _Arena(sizes) as arena:
        n, figures = min(sizes.rows // 2, sizes.batch_size), {}
        size = n * arena.row_bytes
        for kind in ("pinned", "managed"):
            uvm = arena.device.uvm(kind).allocate(sizes.rows, arena.row_bytes)
            uvm.commit(sizes.rows)
            mine, others = np.split(arena.slots(2 * n), 2)

            def up(uvm: Any = uvm, mine: Any = mine) -> None:
                arena.rows.copy_rows(mine, uvm, mine)

            def down(uvm: Any = uvm, others: Any = others) -> None:
                uvm.copy_rows(others, arena.rows, others)

            finish = arena.device.synchronize
            figures[f"{kind}.up_gb_per_s"] = size / _seconds(up, finish) / 1e9
            figures[f"{kind}.down_gb_per_s"] = size / _seconds(down, finish) / 1e9
            figures[f"{kind}.both_gb_per_s"] = 2 * size / _seconds(lambda: (up(), down()), finish) / 1e9
    ceiling = copies(sizes)
    both = ceiling["to_gpu_gb_per_s"] + ceiling["from_gpu_gb_per_s"]
    return {**figures, "ratio.both": figures["pinned.both_gb_per_s"] / both}


def training(sizes: Sizes) -> dict[str, Any]:
    """Train DLRM on Criteo's cardinalities: all in ``hbm``, and with 1/37 of it."""
    from tierstore.data import load

    dataset = load("synthetic:criteo", max_rows=sizes.max_rows)
    batches = list(islice(dataset.train(sizes.batch_size), sizes.steps))
    row = RowFormat().row_bytes(sizes.dim, 1)
    every = sum(table.num_embeddings for table in dataset.tables) * row
    budgets = {
        "hbm": {"hbm": "all"},
        "uvm": {"hbm": every // 37, "uvm": every + every // 5, "ssd": 0},
        "uvm_ssd": {"hbm": every // 37, "uvm": every // 10, "ssd": "auto"},
    }
    figures: dict[str, Any] = {}
    for name, budget in budgets.items():
        figures[f"{name}.ms_per_step"] = 1e3 * _step_seconds(sizes, dataset, batches, budget)
    for name in ("uvm", "uvm_ssd"):
        figures[f"ratio.{name}_vs_hbm"] = figures["hbm.ms_per_step"] / figures[f"{name}.ms_per_step"]
    return figures


def _step_seconds(sizes: Sizes, dataset: Any, batches: Any, budget: dict[str, Any]) -> float:
    import torch

    import tierstore
    from tierstore.models import DLRM

    from ._systems import table_configs

    tables = tierstore.EmbeddingBagCollection(
        tables=table_configs(dataset, sizes.dim), device="cuda", config=tierstore.TierConfig(**budget),
        optimizer=tierstore.optim.RowWiseAdagrad(lr=0.02),
    )  # fmt: skip
    model = DLRM(tables, dataset.dense_dim, [128, sizes.dim], [128, 64, 1]).to("cuda")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    begin, warm = 0.0, len(batches) // 2
    for step, batch in enumerate(tierstore.prefetch(batches, model)):
        if step == warm:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        optimizer.zero_grad()
        logits = model(batch.dense.to("cuda", non_blocking=True), batch.sparse).squeeze(1)
        labels = batch.labels.to("cuda", non_blocking=True)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    tables.close(commit=False)
    return took / (len(batches) - warm)


PARTS = {
    "bits": Part("lookups and updates against the CPU's bits", 60, bits, checks=2 * _REPEAT),
    "copies": Part("what torch copies: the ceilings", 20, copies),
    "kernels": Part("gather, pooled lookup and update against a copy", 60, kernels),
    "link": Part("rows between hbm and uvm against the link", 60, link),
    "training": Part("DLRM at 37 times its hbm, against everything in hbm", 240, training),
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]].run(Sizes(**json.loads(sys.argv[2])))))
