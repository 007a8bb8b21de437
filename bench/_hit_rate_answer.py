"""The answer of ``tierstore bench hit-rate``: policies simulated at the requested sizes."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes, parse_bytes
from tierstore.errors import ConfigError

from ._drive import Device

if TYPE_CHECKING:
    from cache_policies import Point, Policy, PreparedTrace

_IO_SECONDS = 0.5
_IO_BYTES = 64 << 20
_MOST = 1 << 62


@dataclass(frozen=True)
class Answer:
    """The result: ``points`` of the online policies, and in ``belady`` the optimum at each of their sizes."""

    source: str
    trace: PreparedTrace
    points: list[Point]
    belady: dict[int, Point]
    size_bytes: dict[tuple[str, int], int]
    row_bytes: int
    iops: float  # random reads per second of the device
    examples_per_batch: int
    examples_per_s: float


def simulate_all(
    args: argparse.Namespace,
    source: Any,
    prepared: PreparedTrace,
    policies: list[Policy],
    sizes: list[Size],
    bars: Any,
) -> Answer:
    """Simulate each policy at each size, and Belady's optimum at each size in rows that came up."""
    from cache_policies.curves import auto_rate
    from tierstore.cache.tiers.sizes import bytes_for

    rows = {
        policy.name: [size.rows(prepared.footprint, args.row_bytes, policy) for size in sizes]
        for policy in policies
    }
    bounds = sorted({n for counts in rows.values() for n in counts})
    runs = len(policies) * len(sizes) + len(bounds)
    rate = auto_rate(prepared, runs) if args.sample == "auto" else parse_sample(args.sample)
    step = bars("simulating", runs)
    points: list[Point] = []
    done = 0
    for policy, counts in [*((policy, rows[policy.name]) for policy in policies), (None, bounds)]:
        points += simulate_one(
            args, prepared, policy or "belady", counts, rate, lambda n, _, d=done: step(d + n)
        )
        done += len(counts)
    online, belady = points[: -len(bounds)], {point.size_rows: point for point in points[-len(bounds) :]}
    by_name = {policy.name: policy for policy in policies}
    size_bytes = {
        (p.policy, p.size_rows): bytes_for(p.size_rows, args.row_bytes, by_name[p.policy]) for p in online
    }
    return Answer(
        source.name, prepared, online, belady, size_bytes, args.row_bytes,
        args.iops or measure_iops(args.io_dir), args.batch_size, args.examples_per_s,
    )  # fmt: skip


def simulate_one(
    args: argparse.Namespace,
    prepared: PreparedTrace,
    policy: Any,
    sizes: list[int],
    rate: float,
    progress: Any,
) -> list[Point]:
    """Simulate ``policy`` at ``sizes`` (rows) under the options of ``args``."""
    from cache_policies import miss_curves

    return miss_curves(
        prepared,
        [policy],
        sizes,
        rate=rate,
        depth=parse_depth(args.depth),
        window=parse_window(args.window),
        on_demand=1,  # as in training, where a prefetch learns from the first batch
        admission=args.admission if policy != "belady" else "always",
        threads=args.threads,
        progress=progress,
    )


@dataclass(frozen=True)
class Size:
    """A cache size as the user gave it."""

    text: str
    number: float
    unit: str  # "%" of the footprint, "rows" or "bytes"

    def rows(self, footprint: int, row_bytes: int, policy: Any) -> int:
        """Return the rows of a cache of this size with ``policy``, whose arrays count."""
        from tierstore.cache.tiers.sizes import slots_for

        if self.unit == "%":
            return max(1, round(footprint * self.number / 100))
        rows = int(self.number) if self.unit == "rows" else slots_for(int(self.number), row_bytes, policy)
        if rows < 1:
            raise ConfigError(
                f"--sizes: {self.text} does not hold a single row of {row_bytes} bytes with policy "
                f"{policy.name}, whose arrays alone take {format_bytes(policy.fixed_bytes)}"
            )
        return rows


def parse_sizes(text: str) -> list[Size]:
    sizes = []
    for part in (part.strip() for part in text.split(",")):
        number = part.removesuffix("%").strip()
        if part.endswith("%") and number.replace(".", "", 1).isdigit():
            size = Size(part, float(number), "%")
        elif part.isdigit():
            size = Size(part, int(part), "rows")
        else:
            size = Size(part, parse_bytes(part, "--sizes"), "bytes")
        if not 0 < size.number < _MOST:
            raise ConfigError(f"--sizes: {part!r} is no size; write 1% of the rows used, 500 rows, or 64MiB")
        sizes.append(size)
    return sizes


def parse_depth(text: str | None) -> int:
    """Return the depth of simulated curves, which is a number; 0 if it is not given, or automatic."""
    if text in (None, "auto"):
        return 0
    if not text.isdecimal():
        raise ConfigError(f"--depth is a number of batches of at least 0, or auto with --hbm, not {text!r}")
    return int(text)


def parse_window(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise ConfigError(f"--window is a number of batches or auto, not {text!r}")
    return int(text)


def parse_sample(text: str) -> float:
    if text in ("exact", "auto"):
        return 1.0
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise ConfigError(f"--sample is a share above 0 and up to 1, or exact, not {text!r}")
    return rate


def measure_iops(folder: str | None) -> float:
    """Measure the random direct reads of 4 KiB per second of the device that ``folder`` is on."""
    with tempfile.TemporaryDirectory(prefix="tierstore-io-", dir=folder) as place:
        device = Device(Path(place) / "device", _IO_BYTES, _IO_SECONDS)
        device.writes()
        return device.reads()
