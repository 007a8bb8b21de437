"""What a training misses while its tiers fill, and afterwards: counts of both halves of its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tierstore.cache.engine import Engine
from tierstore.cache.stats import counters_of
from tierstore.simulation.tiers import Training, of_rank_0, simulate_tiers
from tierstore.trace.trace import Trace


class Counts(NamedTuple):
    """Rows that a table's shards on one rank look up, each row of a batch once."""

    rows: float = 0
    hbm_misses: float = 0
    """Of these, rows that are not in hbm."""
    ssd_reads: float = 0
    new: float = 0
    """Rows that no tier has, since no batch has updated them yet. They are among the misses of hbm."""

    def per_batch(self, earlier: Counts, batches: int) -> Counts:
        """Return the means over ``batches`` batches since ``earlier``."""
        return Counts(*((now - then) / batches for now, then in zip(self, earlier, strict=True)))

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts(*(one + two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Halves:
    """Means per batch, by rank and by table: ``cold`` of ``cold_batches`` batches, whose lookups fill the
    tiers, and ``steady`` of ``batches`` batches after these."""

    cold_batches: int
    batches: int
    cold: Sequence[Mapping[str, Counts]]
    steady: Sequence[Mapping[str, Counts]]


def counts_of(engine: Engine) -> dict[str, Counts]:
    """Return the counts of the whole tables' shards in ``engine``, without batches that are planned ahead."""
    saved: dict[str, Any] = counters_of(engine.groups)
    found: dict[str, Counts] = {}
    for group in engine.groups:
        by_tier = saved[group.name]["tables"]
        tiers = list(by_tier.values())
        for index in group.tables:
            table = engine.tables[index]
            (rows, hits), (asked, had) = tiers[0][index], tiers[-1][index]
            reads = by_tier["ssd"][index][1] if "ssd" in by_tier else 0
            name = table.origin or table.name
            found[name] = found.get(name, Counts()).plus(Counts(rows, rows - hits, reads, asked - had))
    return found


def simulated_halves(
    source: Trace, training: Training, batches: int, step: Callable[[int], object]
) -> Halves:
    """Simulate ``training`` on the ``batches`` batches of ``source``. ``step`` is called with the batches so
    far. One batch has no half, and counts as the second one.

    ``source`` and ``training`` are as for :func:`tierstore.simulation.simulate_tiers`.
    """
    ranks = 1 if training.plan is None else training.plan.world_size
    cold_batches = (batches + 1) // 2 if batches > 1 else 0
    nothing: list[dict[str, Counts]] = [{} for _ in range(ranks)]
    ends = {end: list(nothing) for end in (cold_batches, batches)}
    shown = of_rank_0(step)

    def after_step(rank: int, done: int, engine: Engine) -> None:
        shown(rank, done, engine)
        if done in ends:
            ends[done][rank] = counts_of(engine)

    simulate_tiers(source, training, after_step)
    cold, steady = [], []
    for middle, last in zip(ends[cold_batches], ends[batches], strict=True):
        cold.append({t: counts.per_batch(Counts(), max(1, cold_batches)) for t, counts in middle.items()})
        steady.append(
            {t: end.per_batch(middle.get(t, Counts()), batches - cold_batches) for t, end in last.items()}
        )
    return Halves(cold_batches, batches - cold_batches, cold, steady)
