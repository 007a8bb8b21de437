"""``tierstore bench gpu``: kernels, rows on their way, planning and training on one GPU.

Each part is a process of its own with a deadline, and its figures are written when it ends, so that a run
that is cut short still says something. Ratios are of one run. None of this has ever run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tierstore.errors import GpuError
from tierstore.result_file import JsonFile, machine

from ._gpu_parts import PARTS, Sizes

SUMMARY = "kernels, links, planning and training on one GPU: each part by itself, with a deadline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for one in fields(Sizes):
        name = one.name.replace("_", "-")
        parser.add_argument(
            f"--{name}", type=int, default=one.default, metavar="N", help=f"(default: {one.default})"
        )
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help="which parts (default: all of them)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, after each part")


def run(args: argparse.Namespace) -> int:
    sizes = Sizes(**{one.name: getattr(args, one.name) for one in fields(Sizes)})
    out = JsonFile(args.json) if args.json else None
    chosen = [name for name in args.parts.split(",") if name]
    result: dict[str, Any] = {"machine": machine(), "sizes": asdict(sizes), "gpu": None, "parts": {}}
    missing = why_no_gpu()
    if missing:
        checks = sum(PARTS[name].checks for name in chosen)
        result["not_run"] = {"parts": chosen, "checks": checks, "why": missing}
        print(f"{len(chosen)} parts with {checks} checks want a GPU and did not run: {missing}")
    else:
        result["gpu"] = gpu_name()
        for name in chosen:
            result["parts"][name] = _run_part(name, args)
            _print(name, result["parts"][name])
            if out:
                out.write(result)
    if out:
        out.write(result)
    return 1 if missing or any("failed" in part for part in result["parts"].values()) else 0


def why_no_gpu() -> str:
    """Return why no GPU can be used here; nothing where one can."""
    from tierstore.modules import open_cuda

    try:
        open_cuda(None).close()
    except GpuError as error:
        return str(error)
    return ""


def gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def _run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    sizes = {one.name: getattr(args, one.name) for one in fields(Sizes)}
    command = [sys.executable, "-m", f"{__package__}._gpu_parts", name, json.dumps(sizes)]
    begin, deadline = time.monotonic(), PARTS[name].seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {deadline} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "seconds": round(time.monotonic() - begin, 1)}


def _print(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}: {PARTS[name].summary}")
    for key, value in figures.items():
        print(f"  {key:<32} {value:.4g}" if isinstance(value, float) else f"  {key:<32} {value}", flush=True)
