"""``tierstore bench gpu``: kernels, rows on their way, planning and training on one GPU.

Each part is a process of its own with a deadline, and its figures are written when it ends, so that a run
that is cut short still says something. Ratios are of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tierstore.result_file import JsonFile, machine

from ._checks import check_known
from ._gpu_parts import OPENING, PARTS
from ._gpu_sizes import RATIO, Sizes
from ._gpu_targets import comparisons, targets

SUMMARY = "kernels, links, planning and training on one GPU: each part by itself, with a deadline"
_LEAST = 5.0
"""Seconds in which no part can even begin."""
_SAYING = 2.0
_LINES = 60
"""Lines of what a part that failed has said at last: of tracebacks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for one in fields(Sizes):
        name = one.name.replace("_", "-")
        parser.add_argument(
            f"--{name}",
            type=int,
            default=one.default,
            metavar="N",
            help=f"{one.metadata['help']} (default: {one.default})",
        )
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help="which parts (default: all of them)"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, metavar="N", help="minutes for all parts together (default: 8)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, after each part")


def run(args: argparse.Namespace) -> int:
    sizes = Sizes(**{one.name: getattr(args, one.name) for one in fields(Sizes)})
    chosen = args.parts.split(",")
    check_known("--parts", chosen, list(PARTS))
    out = JsonFile(args.json) if args.json else None
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", ignore_cleanup_errors=True) as folder:
        return _Run(sizes, Path(folder), out, args.minutes).all(chosen)


class _Run:
    """One run: the result so far, and the time that is left."""

    def __init__(self, sizes: Sizes, folder: Path, out: JsonFile | None, minutes: float) -> None:
        self._sizes, self._folder, self._out = sizes, folder, out
        self._end = time.monotonic() + 60 * minutes
        self._parts: dict[str, dict[str, Any]] = {}
        self._result = {"machine": machine(), "sizes": asdict(sizes), "gpu": None, "parts": self._parts}

    def all(self, chosen: list[str]) -> int:
        """Run the parts in their order, after the one that opens the GPU. Return the exit status."""
        opened = self._part(OPENING)
        if "gpu" not in opened:
            self._missing([name for name in chosen if name != OPENING], opened["failed"])
            return 1
        self._result["gpu"] = opened["gpu"]
        if "max_rows" in opened:
            self._sizes = replace(self._sizes, max_rows=opened["max_rows"])
            self._result["tables"] = {key: opened[key] for key in ("max_rows", "table_rows", "scale")}
        self._ended(OPENING, opened)
        trains = any(PARTS[name].trains for name in chosen)
        for name in PARTS:
            if name != OPENING and (name in chosen or (name == "batches" and trains)):
                self._ended(name, self._part(name))
        self._summary()
        return 1 if any("failed" in figures for figures in self._parts.values()) else 0

    def _missing(self, names: list[str], why: str) -> None:
        checks = sum(PARTS[name].checks for name in names)
        self._result["not_run"] = {"parts": names, "checks": checks, "why": why}
        print(f"{len(names)} parts with {checks} checks want a GPU and did not run: {why}")
        self._write()

    def _ended(self, name: str, figures: dict[str, Any]) -> None:
        self._parts[name] = figures
        self._result["targets"] = targets(self._parts)
        self._result["ratios"] = comparisons(self._parts)
        self._write()
        print(f"{name}: {PARTS[name].summary}")
        for key, value in figures.items():
            if key == "where":
                value = f"{value[-1].strip()} (all of it is in the file of --json)"
            print(f"  {key:<32} {value:.4g}" if isinstance(value, float) else f"  {key:<32} {value}")
        sys.stdout.flush()

    def _write(self) -> None:
        if self._out:
            self._out.write(self._result)

    def _summary(self) -> None:
        tables: Any = self._result.get("tables", {})
        if tables:
            print(
                f"tables: {tables['table_rows']:,} rows, {tables['scale']:.3g} of Criteo's, "
                f"{RATIO} times the budget of hbm"
            )
        found: Any = self._result["targets"]
        for name, one in found.items():
            said = "not measured" if one["ratio"] is None else f"{one['ratio']:.3f}"
            print(f"{name:<26} {said:>12}   target {one['target']:.2f}")
        for name, ratio in self._result["ratios"].items():  # type: ignore[attr-defined]
            print(f"{name:<44} {ratio:.3f}")

    def _part(self, name: str) -> dict[str, Any]:
        """Run a part in a process of its own, and return what it found before its end or its deadline."""
        begin = time.monotonic()
        deadline = min(float(PARTS[name].seconds), self._end - begin)
        if deadline < _LEAST:
            return {"failed": "not begun: no time was left"}
        sizes = json.dumps(asdict(self._sizes))
        command = [sys.executable, "-m", f"{__package__}._gpu_parts", name, sizes, str(self._folder)]
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
            code = _run(command, deadline, said, errors, self._folder)
            figures, lines = _last_figures(said), _lines(errors)
        if code is None:
            figures["failed"] = f"not done after {deadline:.0f} s"
        elif code < 0 and "failed" not in figures:
            figures["failed"] = f"exit code {code}"
        elif code and "failed" not in figures:
            figures["failed"] = (lines or [f"exit code {code}"])[-1]
        if code != 0 and lines:
            figures["where"] = lines[-_LINES:]
        return {**figures, "seconds": round(time.monotonic() - begin, 1)}


def _run(command: list[str], deadline: float, said: Any, errors: Any, folder: Path) -> int | None:
    """Return the exit status of a command; None where it was killed, with all that it started. What it
    leaves behind is in ``folder``."""
    process = subprocess.Popen(
        command, stdout=said, stderr=errors, start_new_session=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    try:
        return process.wait(deadline)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGABRT)  # Python says where it hangs
            process.wait(_SAYING)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAST)  # a process that hangs in the driver may never end


def _lines(file: Any) -> list[str]:
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()]


def _last_figures(file: Any) -> dict[str, Any]:
    """Return the last whole line of figures."""
    for line in reversed(_lines(file)):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}
