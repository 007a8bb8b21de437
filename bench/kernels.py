"""``tierstore bench kernels``: lookup and fused update against fbgemm's and against copying, in turns."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tierstore import optim
from tierstore.cache.device import HOST, Bags, LookupArgs, UpdateArgs, build_csr, make_batch
from tierstore.row_format import TABLE_DTYPES, RowFormat

from ._checks import check_memory, importing, use_threads

SUMMARY = "milliseconds of lookup and update per batch, beside fbgemm-gpu's and a copy of as many bytes"
_BATCHES = 4
_FBGEMM_OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=26, help="number of tables (default: 26)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows per table (default: 100000)")
    parser.add_argument("--dim", type=int, default=64, help="embedding dimension (default: 64)")
    parser.add_argument("--batch-size", type=int, default=2048, help="examples per batch (default: 2048)")
    parser.add_argument("--pooling-factor", type=int, default=4, help="ids per bag (default: 4)")
    parser.add_argument(
        "--dtype", default="fp32", choices=TABLE_DTYPES, help="measure tables of this dtype, too"
    )
    parser.add_argument(
        "--optimizer",
        default="rowwise_adagrad",
        choices=sorted(optim.OPTIMIZERS),
        metavar="NAME",
        help=f"optimizer of the rows: {', '.join(sorted(optim.OPTIMIZERS))} (default: rowwise_adagrad)",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of either library (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds; the median of all batches counts (default: 7)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    import torch

    _check_sizes(args)
    use_threads(args.threads)
    rng = np.random.default_rng(0)
    ids = [
        rng.integers(0, args.rows, (args.tables, args.batch_size * args.pooling_factor))
        for _ in range(_BATCHES)
    ]
    grad = torch.randn(args.batch_size, args.tables * args.dim)
    contenders: list[Any] = [Ours(args, ids, grad, rng)]
    if args.dtype != "fp32":
        contenders.append(Ours(args, ids, grad, rng, args.dtype))
    if args.optimizer in _FBGEMM_OPTIMIZERS and find_spec("fbgemm_gpu"):
        contenders.append(Fbgemm(args, ids, grad))
    samples: dict[str, list[float]] = {}
    for turn in range(args.rounds + 1):
        for batch in range(_BATCHES):  # interleaved, so that a busy minute does not hit one of them only
            for contender in contenders:
                for key, seconds in contender.step(batch).items():
                    if turn:  # the first round warms up
                        samples.setdefault(key, []).append(1e3 * seconds)
    figures = {key: float(np.median(values)) for key, values in samples.items()}
    figures |= ratios(figures)
    for key, value in figures.items():
        print(f"{key:<28} {value:>10.2f}")
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": None, **figures}, indent=1))
    return 0


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise ConfigError for rows or batches that this machine's memory does not hold."""
    spec = optim.make(args.optimizer)
    row_bytes = RowFormat().row_bytes(args.dim, spec.state_floats(args.dim))
    check_memory(args.tables * args.rows * row_bytes, "the rows", "--tables, --rows, --dim")
    ids = args.tables * args.batch_size * args.pooling_factor
    options = "--tables, --batch-size, --pooling-factor, --dim"
    check_memory(ids * (row_bytes + 8 * _BATCHES), "the batches", options)


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """Return the speedup over fbgemm: transposing the batch counts as backward, dedup as neither."""
    if "fbgemm.forward_ms" not in figures:
        return {}
    forward, backward = figures["lookup_ms"], figures["csr_ms"] + figures["update_ms"]
    theirs = figures["fbgemm.forward_ms"], figures["fbgemm.backward_ms"]
    return {
        "ratio.forward": theirs[0] / forward,
        "ratio.backward": theirs[1] / backward,
        "ratio.both": sum(theirs) / (forward + backward),
    }


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class Ours:
    """All tables in one arena, every row in a random slot, as after long use of a cache."""

    def __init__(
        self, args: argparse.Namespace, ids: list[np.ndarray], grad: Any, rng: Any, dtype: str = "fp32"
    ) -> None:
        self.args, self.grad, self.ids, self.dtype = args, grad, ids, dtype
        self.spec = optim.make(args.optimizer)
        self.row_bytes = RowFormat(dtype).row_bytes(args.dim, self.spec.state_floats(args.dim))
        total = args.tables * args.rows
        self.arena = np.full((total, self.row_bytes // 4), 0.01, np.float32)  # also of 16 bits: finite
        slot_of = rng.permutation(total).astype(np.int32)
        self.slots = [slot_of[self._rows(self.dedup(batch).unique)] for batch in ids]
        bags = args.tables * args.batch_size
        per_table = np.arange(args.tables, dtype=np.int64)
        self.bags = Bags(
            offsets=np.arange(bags + 1, dtype=np.int64) * args.pooling_factor,
            bag_start=np.arange(args.tables + 1, dtype=np.int64) * args.batch_size,
            out_offset=per_table * args.dim,
            out_stride=np.full(args.tables, args.tables * args.dim, np.int64),
            modes=np.zeros(args.tables, np.uint8),
        )
        self.copy = np.ones((bags * args.pooling_factor, self.row_bytes), np.uint8)

    def _rows(self, keys: np.ndarray) -> np.ndarray:
        return (keys >> np.uint64(48)) * np.uint64(self.args.rows) + (keys & np.uint64((1 << 48) - 1))

    def dedup(self, ids: np.ndarray) -> Any:
        segments = [(row.ctypes.data, len(row), False, t, self.args.rows, -1) for t, row in enumerate(ids)]
        return make_batch(segments)[0]

    def step(self, index: int) -> dict[str, float]:
        import torch

        slots, dim = self.slots[index], self.args.dim
        rows = HOST.load(self.arena.view(np.uint8), self.dtype)
        dedup, batch = timed(lambda: self.dedup(self.ids[index]))

        def lookup() -> Any:
            out = torch.empty_like(self.grad)
            args = LookupArgs(dim=dim, slots=slots, inverse=batch.inverse)
            rows.lookup_pooled(args, self.bags, out.data_ptr())
            return out

        def update() -> None:
            step, (start, positions) = self.spec.step_args(), csr
            args = UpdateArgs(dim=dim, slots=slots, csr_start=start, csr_positions=positions, step=step)
            rows.update_pooled(args, self.bags, self.grad.data_ptr())

        looked_up, _ = timed(lookup)
        transposed, csr = timed(lambda: build_csr(batch.inverse, len(slots)))
        updated, _ = timed(update)
        gathered, _ = timed(lambda: rows.copy_out(slots, self.copy))
        first = self.arena[: len(slots)].view(np.uint8)
        copied, _ = timed(lambda: np.copyto(self.copy[: len(slots)], first))
        figures = {
            "dedup_ms": dedup,
            "lookup_ms": looked_up,
            "csr_ms": transposed,
            "update_ms": updated,
            "gather_rows_ms": gathered,
            "memcpy_rows_ms": copied,
        }
        prefix = "" if self.dtype == "fp32" else f"{self.dtype}."
        return {prefix + key: seconds for key, seconds in figures.items()}


class Fbgemm:
    """The same tables in fbgemm's table-batched embedding on the CPU."""

    def __init__(self, args: argparse.Namespace, ids: list[np.ndarray], grad: Any) -> None:
        import torch

        with warnings.catch_warnings(), importing("fbgemm-gpu"):
            warnings.simplefilter("ignore")
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
            from fbgemm_gpu.split_embedding_configs import EmbOptimType

        place = (training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(args.rows, args.dim, *place)] * args.tables,
            optimizer=EmbOptimType[_FBGEMM_OPTIMIZERS[args.optimizer]],
            learning_rate=0.01,
        )
        self.tables.init_embedding_weights_uniform(-0.1, 0.1)
        self.ids = [torch.from_numpy(batch.reshape(-1)) for batch in ids]
        self.offsets = torch.arange(args.tables * args.batch_size + 1) * args.pooling_factor
        self.grad = grad

    def step(self, index: int) -> dict[str, float]:
        forward, out = timed(lambda: self.tables(self.ids[index], self.offsets))
        backward, _ = timed(lambda: out.backward(self.grad))
        return {"fbgemm.forward_ms": forward, "fbgemm.backward_ms": backward}
