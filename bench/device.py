"""``tierstore bench device``: measures this machine, and writes a topology for the planner."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tierstore.config import format_bytes
from tierstore.errors import ConfigError

from ._checks import check_ranks, device_file
from ._drive import Device, Drives, direct_flag
from ._exchange import exchange_figures
from ._folder import folder, temporary_folders

SUMMARY = "memory and SSD figures of this machine, as a topology for tierstore plan"

_DEEPEST = 4096
"""Reads in flight that no drive needs more of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the topology there")
    parser.add_argument(
        "--dir",
        type=folder,
        nargs="+",
        help="folder on the drive to measure, or one on each of several drives that every rank's store is "
        "spread over (default: the temporary one)",
    )
    parser.add_argument("--file-size", default="1GiB", help="size of the file that is read (default: 1GiB)")
    parser.add_argument(
        "--queue-depth", type=int, default=128, help="reads in flight (default: 128, the store's)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement (default: 1)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the machine (default: 1)")
    parser.add_argument(
        "--no-runtime",
        action="store_true",
        help="leave out the costs per row (half a minute)",
    )


def run(args: argparse.Namespace) -> int:
    size = device_file(args.file_size, "--file-size", args.dir)
    if args.queue_depth > _DEEPEST:
        raise ConfigError(f"--queue-depth is {args.queue_depth}; it must be at most {_DEEPEST}")
    check_ranks(args.ranks)
    topology = measure(args, size)
    for key, value in topology.items():
        print(f"{key:<22} {_text(key, value)}")
    if args.json:
        args.json.write_text(json.dumps(topology, indent=1))
        print(f"written: {args.json}; give it to tierstore plan --topology")
    return 0


def measure(args: argparse.Namespace, file_size: int) -> dict[str, Any]:
    """Measure the fields of a Topology of one host, but for bandwidths between hosts."""
    memory = psutil.virtual_memory().total
    copy = memory_bandwidth(args.seconds)
    result: dict[str, Any] = {
        "hosts": 1,
        "ranks_per_host": args.ranks,
        "hbm_per_rank": memory // 4 // args.ranks,
        "host_memory_per_host": memory // 2,
        "processors_per_rank": (os.cpu_count() or 2) / args.ranks,
        "device": "cpu",
    }
    # On a CPU the fast tier is an arena in the same memory, and the link is a copy within it.
    result |= {"hbm_bw": copy / args.ranks, "host_link_bw": copy / args.ranks}
    result |= cuda_figures(args.seconds)
    if result["ranks_per_host"] > 1:
        result |= exchange_figures(result["ranks_per_host"], args.seconds, result["device"])
    with temporary_folders(args.dir) as folders:
        free = {path.stat().st_dev: psutil.disk_usage(str(path)).free for path in folders}
        result["ssd_per_host"] = sum(free.values())
        result |= drive_figures([path / "device" for path in folders], file_size, args)
        result["measured"] = {
            "drives": len(folders),
            "queue_depth": args.queue_depth,
            "file_size": args.file_size,
            "unix_time": int(time.time()),
        }
        if args.no_runtime or result["device"] != "cpu":
            result["index_rows_per_s"] = index_rate(args.seconds)
        else:
            result |= runtime_costs(result)
    return result


def runtime_costs(measured: dict[str, Any]) -> dict[str, Any]:
    """Return what the CPU engine itself takes per row and byte, one thread computing.

    These rates replace the rates of plain copies. ``measured``: all other fields; its notes get what a step
    takes beside its rows.
    """
    from ._runtime_costs import one_thread, runtime_figures

    one_thread()
    figures = runtime_figures({name: value for name, value in measured.items() if name.startswith("ssd_")})
    measured["measured"]["step_s"] = figures.pop("step_s")
    return figures


def memory_bandwidth(seconds: float) -> float:
    """Return the bytes per second, read and written, of two threads that copy more than the caches hold."""
    arrays = [(np.ones(1 << 24), np.empty(1 << 24)) for _ in range(min(2, os.cpu_count() or 1))]

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
        np.copyto(pair[1], pair[0])

    with ThreadPoolExecutor(len(arrays)) as pool:
        return _rate(
            lambda: sum(2 * pair[0].nbytes for pair, _ in zip(arrays, pool.map(copy, arrays), strict=True)),
            seconds,
        )


def index_rate(seconds: float) -> float:
    """Return the ids per second that one thread deduplicates, as the planner of a batch does."""
    from tierstore.cache.tiers.memory import MemoryTier, TierPlan

    ids = np.random.default_rng(0).zipf(1.2, 1 << 17).astype(np.uint64) % np.uint64(1 << 24)
    tier = MemoryTier("hbm", TierPlan(1 << 17, holds_all=True), 16, "lru", 1)

    def plan() -> int:
        unique, inverse = np.unique(ids, return_inverse=True)
        tier.slots_of(unique)
        return len(inverse)

    return _rate(plan, seconds)


def cuda_figures(seconds: float) -> dict[str, Any]:
    """Measure the device memory and the link of the first GPU; return nothing where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    device = torch.device("cuda", 0)
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    ours = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    other = torch.empty_like(ours)

    def timed(copy: Callable[[], object], size: int) -> float:
        def once() -> int:
            copy()
            torch.cuda.synchronize()
            return size

        return _rate(once, seconds)

    return {
        "device": "cuda",
        "ranks_per_host": torch.cuda.device_count(),
        "hbm_per_rank": int(torch.cuda.get_device_properties(0).total_memory * 0.9),
        "hbm_bw": timed(lambda: other.copy_(ours), 2 << 28),
        "host_link_bw": timed(lambda: ours.copy_(host, non_blocking=True), 1 << 28),
    }


def drive_figures(paths: list[Path], size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Write a file on each drive, then read it at random in several sizes, as the store does: past the page
    cache where the file system can, many reads in flight on each drive, all drives at once."""
    device = Drives([Device(path, size, args.seconds) for path in paths])
    write = device.writes()
    curve = device.read_curve(args.seconds, args.queue_depth)
    print("random reads:", ", ".join(f"{size // 1024} KiB {rate:,.0f}/s" for size, rate in curve))
    return {
        "ssd_write_bw": write,
        "ssd_bw": max(size * rate for size, rate in curve),
        "ssd_read_iops": curve[0][1],
        **({} if all(direct_flag(path.parent) for path in paths) else {"measured_through_page_cache": True}),
    }


def _rate(call: Callable[[], int], seconds: float) -> float:
    """Return the sum of what ``call`` returns, per second."""
    call()
    total, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or not total:
        total += call()
    return total / max(spent, 1e-9)


def _text(key: str, value: Any) -> str:
    if isinstance(value, int) and key.startswith(("hbm_per", "host_memory_per", "ssd_per")):
        return format_bytes(value)
    if key in ("row_seconds", "exchange_seconds"):
        scale, unit = (1e9, "ns") if key == "row_seconds" else (1e6, "us")
        return ", ".join(f"{name} {seconds * scale:,.0f} {unit}" for name, seconds in value.items())
    if key.endswith("overlap_loss"):
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{format_bytes(int(value))}/s" if key.endswith("_bw") else f"{value:,.0f}/s"
    return str(value)
