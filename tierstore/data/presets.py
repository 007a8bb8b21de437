"""The synthetic datasets by name: the statistics of their tables, and the sources of these figures."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.data.popularity import stream_seed, uniform
from tierstore.data.synthetic import SyntheticDataset, SyntheticTable
from tierstore.errors import ConfigError

# Rows of the 26 tables of MLPerf's DLRM-DCNv2 (Criteo 1TB, capped at 40 M), from the README of torchrec_dlrm
# in github.com/facebookresearch/dlrm.
CRITEO_CARDINALITIES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)


def zipf(
    s: str = "1.0",
    q: str = "0",
    *,
    seed: int = 0,
    tables: int = 8,
    rows: int = 1_000_000,
    pooling_factor: float = 1.0,
    drift: float = 0.0,
    examples: int | None = None,
) -> SyntheticDataset:
    """Make ``tables`` equal tables, each drawn from whole: P(k-th most popular of ``rows``) ~ (k + q)^-s."""
    try:
        exponent, shift = float(s), float(q)
    except ValueError:
        raise ConfigError(
            f"synthetic:zipf takes numbers, as in synthetic:zipf:0.95, not {s!r}, {q!r}"
        ) from None
    specs = [SyntheticTable(f"t{t}", rows, exponent, shift, pooling_factor) for t in range(tables)]
    return SyntheticDataset(f"synthetic:zipf:{exponent:g}", tuple(specs), seed, drift, examples)


def mixed(
    *,
    seed: int = 0,
    tables: int = 26,
    max_rows: int = 10_000_000,
    drift: float = 0.0,
    examples: int | None = None,
) -> SyntheticDataset:
    """Make tables that differ: rows log-uniform in 10 .. ``max_rows``, s in .6 .. 1.2, q in 0 .. 100.

    The pooling factor is log-uniform in 1 .. 100; its mean is 21.
    """
    specs = []
    for t in range(tables):
        u = [uniform(stream_seed(seed, t), stream_seed(i)) for i in range(4)]
        rows = max(10, round(10 * (max_rows / 10) ** u[0]))
        table = SyntheticTable(f"t{t}", rows, s=0.6 + 0.6 * u[1], q=100 * u[2], pooling_factor=100.0 ** u[3])
        specs.append(table)
    return SyntheticDataset("synthetic:mixed", tuple(specs), seed, drift, examples)


def criteo(*, seed: int = 0, max_rows: int = 40_000_000, examples: int | None = None) -> SyntheticDataset:
    """Make one id from each of the 26 tables of the MLPerf DLRM data, capped at ``max_rows`` rows.

    s = 1.15 gives the unique ratio, .18, of the first 7,500 examples of the recorded data.
    """
    if max_rows < 1:
        raise ConfigError(f"synthetic:criteo: max_rows must be at least 1, not {max_rows}")
    specs = [SyntheticTable(f"cat_{t}", min(n, max_rows), 1.15) for t, n in enumerate(CRITEO_CARDINALITIES)]
    return SyntheticDataset("synthetic:criteo", tuple(specs), seed, num_train=examples)


def meta2021(
    *,
    seed: int = 0,
    tables: int = 8,
    rows: int = 1_000_000,
    pooling_factor: float = 8.3,
    drift: float = 0.001,
    examples: int | None = None,
) -> SyntheticDataset:
    """Make tables with the reuse within a batch of Meta's dlrm_datasets 2021.

    That data has 856 tables and a batch of 65,536 examples. At this batch size 13 % of the lookups are
    distinct ids. The shares of ids and of lookups used once, twice, 3-4 times, ... are within .03 of the
    published shares. The ids in play, and so the drift, are a guess: one published batch tells nothing of the
    rest of the table. One kind of table does not give these statistics; two kinds, half of the tables each,
    do. ``pooling_factor`` is the mean of both kinds.
    """
    kinds = ((1.03, 8.24, 1.41 * pooling_factor, 34_260), (0.991, 898.0, 0.59 * pooling_factor, 223_900))
    specs = []
    for t in range(tables):
        s, q, mean, in_play = kinds[t % 2]
        specs.append(SyntheticTable(f"t{t}", rows, s, q, max(1.0, mean), min(in_play, rows)))
    return SyntheticDataset("synthetic:meta2021", tuple(specs), seed, drift, examples)


def meta2022(
    *,
    seed: int = 0,
    tables: int = 8,
    rows: int = 1_000_000,
    drift: float = 0.001,
    examples: int | None = None,
) -> SyntheticDataset:
    """Make the data set of the year 2022: 788 tables, batches of 131,072 examples, unique ratio .078."""
    kinds = (
        {"q": 0.0, "pooling_factor": 12.1, "in_play": 331_000},
        {"q": 71.0, "pooling_factor": 15.1, "in_play": 70_600},
    )
    specs = []
    for t in range(tables):
        kind = kinds[t % 2]
        in_play = min(int(kind["in_play"]), rows)
        specs.append(SyntheticTable(f"t{t}", rows, 0.968, kind["q"], kind["pooling_factor"], in_play))
    return SyntheticDataset("synthetic:meta2022", tuple(specs), seed, drift, examples)


PRESETS: dict[str, Callable[..., SyntheticDataset]] = {
    preset.__name__: preset for preset in (zipf, mixed, criteo, meta2021, meta2022)
}
