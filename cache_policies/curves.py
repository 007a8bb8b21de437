"""Miss ratios of several policies at several sizes, in parallel, on a sample of the rows where the trace is
long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np

from cache_policies import registry
from cache_policies.admission import Admission
from cache_policies.errors import PolicyError
from cache_policies.policy import Policy
from cache_policies.prepared import PreparedTrace, first_batches, prepare
from cache_policies.reuse import sample
from cache_policies.simulation import Simulation
from cache_policies.simulator import simulate

#: Row uses that ``auto_rate`` lets a set of simulations go through, about a minute on two cores.
EXACT_USES = 800_000_000
#: Fewer sampled rows than this make a curve uncertain by more than about .01.
FEWEST_ROWS = 20_000
#: Sizes of a steady curve.
STEADY_SIZES = 12


@dataclass(frozen=True)
class Point:
    """One policy at one size. Ratios and ``misses`` are of the whole trace, estimated if ``rate`` < 1."""

    policy: str
    size_rows: int
    window: int
    rate: float
    misses: float
    access_misses: float
    accesses: int
    uniques: int
    footprint: int
    overflowed: float

    @property
    def miss_ratio(self) -> float:
        """Return the misses per access."""
        return self.access_misses / max(1, self.accesses)

    @property
    def unique_miss_ratio(self) -> float:
        """Return the misses per unique row of a batch."""
        return self.misses / max(1, self.uniques)

    @property
    def capacity_miss_ratio(self) -> float:
        """Return the misses per unique row of a batch, without compulsory misses."""
        return max(0.0, self.misses - self.footprint) / max(1, self.uniques)


def auto_rate(trace: PreparedTrace, runs: int) -> float:
    """Return 1 if ``runs`` exact simulations are quick enough, else a rate with enough rows to estimate."""
    work = trace.uniques * max(1, runs)
    if work <= EXACT_USES:
        return 1.0
    return min(1.0, max(EXACT_USES / work, FEWEST_ROWS / max(1, trace.footprint)))


def miss_curves(
    batches: Iterable[np.ndarray] | PreparedTrace,
    policies: Sequence[str | Policy | type[Policy]],
    sizes: Sequence[int],
    *,
    rate: float | None = None,
    depth: int = 0,
    window: int | str = 0,
    on_demand: int = 0,
    admission: str | Admission = "always",
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Simulate every policy at every size (rows, at least 1); points in order of policy, then size.

    ``rate`` is the share of rows to sample (1: exact; None: ``auto_rate``). Below 1 the caches shrink with
    the rows (Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX ATC
    2017). ``progress(done, total)`` is called after each simulation.
    """
    trace = prepare(batches)
    chosen = [registry.get(policy) for policy in policies]
    if not chosen or not sizes or min(sizes) < 1:
        raise PolicyError(f"give at least one policy, and sizes of at least one row; got {list(sizes)}")
    runs = [(policy, int(size)) for policy in chosen for size in sizes]
    rate = auto_rate(trace, len(runs)) if rate is None else rate
    part = sample(trace, rate)
    if rate < 1 and part.footprint:
        rate = part.footprint / trace.footprint  # what chance made of it

    def run(policy: Policy, size: int) -> Point:
        slots = max(1, min(round(size * rate), part.footprint + part.largest_batch))
        known = window_for(part, slots) if window == "auto" else int(window)
        result = simulate(
            part, policy, slots, depth=depth, window=known, on_demand=on_demand, admission=admission
        )
        return _point(trace, size, known, rate, result)

    results: dict[int, Point] = {}
    with ThreadPoolExecutor(max(1, threads)) as pool:
        futures = {pool.submit(run, *arguments): i for i, arguments in enumerate(runs)}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                results[futures[future]] = future.result()
                if progress:
                    progress(done, len(runs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[i] for i in range(len(runs))]


def steady_curve(
    trace: PreparedTrace,
    policy: str | Policy | type[Policy],
    *,
    rate: float | None = None,
    depth: int = 1,
    window: int | str = "auto",
) -> dict[str, list[float]]:
    """Return the misses of ``policy`` per unique row of a batch in the second half of the batches: a table of
    what ``tierstore plan --stats`` reads, but for the figures of a batch.

    Uses of the first half fill the memory. The least of the sizes holds the rows of ``depth`` + 1 batches,
    or half of the rows if these are fewer. The largest holds all rows.
    """
    floor = max(1, min((depth + 1) * trace.largest_batch, trace.footprint // 2))
    sizes = np.unique(
        np.geomspace(floor, max(floor, trace.footprint), STEADY_SIZES).astype(np.int64)
    ).tolist()
    rate = auto_rate(trace, 2 * len(sizes)) if rate is None else rate
    halves = first_batches(trace, (trace.batches + 1) // 2 if trace.batches > 1 else 0), trace
    both = [miss_curves(part, [policy], sizes, rate=rate, depth=depth, window=window) for part in halves]
    uniques = max(1, trace.uniques - halves[0].uniques)
    misses = np.array([end.misses - middle.misses for middle, end in zip(*both, strict=True)])
    capacity = misses - [end.footprint - middle.footprint for middle, end in zip(*both, strict=True)]
    return {
        "sizes_rows": sizes,
        "unique_miss_ratio": np.clip(misses / uniques, 0, 1).tolist(),
        "capacity_miss_ratio": np.clip(capacity / uniques, 0, 1).tolist(),
    }


def window_for(trace: PreparedTrace, slots: int, cover: float = 5.0, max_window: int = 256) -> int:
    """Return the window that a live prefetch chooses (docs/reference/policies.md), in batches.

    The window is the smallest whose batches, the planned one included, use ``cover`` times ``slots`` distinct
    rows at the beginning of the trace; ``max_window`` is its limit.
    """
    ends = (
        trace.offsets[1 : max_window + 2]
        if trace.offsets.size
        else np.arange(1, min(max_window + 1, trace.rows.size) + 1)
    )
    for window, end in enumerate(ends):
        if end and trace.rows[:end].max() + 1 >= cover * slots:  # rows are numbered by first use
            return window
    return max(0, len(ends) - 1)


def _point(trace: PreparedTrace, size: int, window: int, rate: float, result: Simulation) -> Point:
    return Point(
        result.policy,
        size,
        window,
        rate,
        result.misses / rate,
        result.access_misses / rate,
        trace.accesses,
        trace.uniques,
        round(result.compulsory / rate),
        result.overflowed / rate,
    )
