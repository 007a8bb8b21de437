"""``tierstore bench checkpoint``: what saving a training costs after a share of its rows has changed."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from ._folder import folder

SUMMARY = "seconds and bytes of checkpoints after 1 % of the rows have changed, and seconds to restore one"
_CHUNK = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table (default: 1000000)")
    parser.add_argument(
        "--dim", type=int, default=64, help="embedding dimension (default: 64; rows of 272 bytes)"
    )
    parser.add_argument("--changed", type=float, default=0.01, help="share that changes (default: 0.01)")
    parser.add_argument("--dense", type=int, default=1_000_000, help="dense parameters (default: 1000000)")
    parser.add_argument(
        "--engines",
        default="native,rocksdb,lmdb",
        help="row stores to measure (default: native,rocksdb,lmdb)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints; the median counts (default: 5)")
    parser.add_argument("--dir", type=folder, help="folder to work in (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from ._checks import check_engines, check_memory

    engines = args.engines.split(",")
    check_engines(engines)
    check_memory(8 * args.rows, "a permutation of the rows", "--rows")
    check_memory(12 * args.dense, "the dense parameters and their gradients", "--dense")
    figures: dict[str, float] = {}
    for engine in engines:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            found = measure(args, engine, Path(folder))
        figures |= {f"{engine}.{name}": value for name, value in found.items()}
    for name, value in figures.items():
        print(f"{name:<32} {value:>16,.4g}")
    if args.json:
        config = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
        }
        args.json.write_text(json.dumps({**config, **figures}, indent=1))
    return 0


def measure(args: argparse.Namespace, engine: str, folder: Path) -> dict[str, float]:
    import torch

    from tierstore import checkpoint

    model = build(args, engine, folder)
    order = torch.Generator().manual_seed(0)
    for ids in torch.randperm(args.rows, generator=order).split(_CHUNK):
        update(model[0], ids)
    checkpoint.save(folder / "checkpoints", model, step=0)
    times: list[float] = []
    sizes: list[float] = []
    changed = max(1, round(args.changed * args.rows))
    for step in range(1, args.rounds + 1):
        update(model[0], torch.randperm(args.rows, generator=order)[:changed])
        written = model[0].stats()["store"]["written_bytes"]
        start = time.perf_counter()
        path = checkpoint.save(folder / "checkpoints", model, step=step)
        times.append(time.perf_counter() - start)
        sizes.append(model[0].stats()["store"]["written_bytes"] - written)
    files = sum(file.stat().st_size for file in path.iterdir())
    model[0].close(commit=False)
    model = build(args, engine, folder)
    start = time.perf_counter()
    checkpoint.restore(folder / "checkpoints", model)
    seconds = time.perf_counter() - start
    model[0].close(commit=False)
    row_bytes = sorted(sizes)[len(sizes) // 2]
    return {
        "save_s": sorted(times)[len(times) // 2],
        "row_bytes": row_bytes,
        "row_bytes_per_changed_byte": row_bytes / (changed * 4 * (args.dim + 4)),
        "file_bytes": files,
        "restore_s": seconds,
    }


def build(args: argparse.Namespace, engine: str, folder: Path) -> Any:
    """Build a tiered table (with row-wise Adagrad) and dense parameters."""
    import torch

    import tierstore

    config = tierstore.TierConfig(hbm="64MiB", path=folder / "rows", engine=engine)
    bag = tierstore.TieredEmbeddingBag(
        args.rows, args.dim, mode="sum", config=config, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1)
    )
    return torch.nn.Sequential(bag, torch.nn.Linear(args.dense, 1, bias=False))


def update(bag: Any, ids: Any) -> None:
    bag(ids.unsqueeze(1)).sum().backward()
