from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from tierstore.data import load
from tierstore.data.presets import CRITEO_CARDINALITIES
from tierstore.errors import ConfigError

# Meta's dlrm_datasets, mean over 16 files: shares of a batch's distinct rows, and of its lookups, by uses in
# the batch (1, 2, 3-4, 5-8, ..., more than 32,768).
ROWS_2021 = [0.423, 0.165, 0.167, 0.121, 0.073, 0.031, 0.011, 0.004, 0.002, 0.001, 0.001, 0]
LOOKUPS_2021 = [
    0.056,
    0.043,
    0.075,
    0.099,
    0.112,
    0.091,
    0.064,
    0.052,
    0.049,
    0.05,
    0.054,
    0.058,
    0.0607,
    0.0521,
    0.038,
    0.026,
    0.02,
]
ROWS_2022 = [0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.01, 0.004, 0.002, 0.001, 0.001]
LOOKUPS_2022 = [
    0.027,
    0.023,
    0.04,
    0.068,
    0.105,
    0.12,
    0.099,
    0.07,
    0.059,
    0.054,
    0.04,
    0.0717,
    0.064,
    0.047,
    0.021,
    0.0171,
    0.0751,
]


def reuse(batch) -> tuple[np.ndarray, np.ndarray, float]:
    """Shares of the distinct rows and of the lookups per power-of-two bin of a row's uses; unique ratio."""
    edges = [0.5, 1.5, *(2**k + 0.5 for k in range(1, 16)), np.inf]
    rows, lookups = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for key in batch.sparse.keys():  # noqa: SIM118 - not a mapping
        uses = np.unique(batch.sparse[key].values().numpy(), return_counts=True)[1]
        rows += np.histogram(uses, bins=edges)[0]
        lookups += np.histogram(uses, bins=edges, weights=uses)[0]
    return rows / rows.sum(), lookups / lookups.sum(), rows.sum() / lookups.sum()


def gap(bins: np.ndarray, published: list[float]) -> float:
    return float(np.abs(bins - np.pad(published, (0, len(bins) - len(published)))).max())


def same(a, b) -> bool:
    return (
        torch.equal(a.sparse.values(), b.sparse.values())
        and torch.equal(a.sparse.lengths(), b.sparse.lengths())
        and torch.equal(a.dense, b.dense)
        and torch.equal(a.labels, b.labels)
    )


def test_meta2021_has_the_published_reuse():
    batch = next(load("synthetic:meta2021", tables=4).train(65_536, start_batch=7))
    assert len(batch.sparse.values()) == pytest.approx(4 * 546_000, rel=0.01)
    rows, lookups, unique = reuse(batch)
    assert unique == pytest.approx(0.132, abs=0.005)
    assert gap(rows, ROWS_2021) < 0.03
    assert gap(lookups, LOOKUPS_2021) < 0.035


def test_meta2022_has_the_published_reuse():
    batch = next(load("synthetic:meta2022", tables=2).train(131_072))
    assert len(batch.sparse.values()) == pytest.approx(2 * 13.6 * 131_072, rel=0.01)
    rows, lookups, unique = reuse(batch)
    assert unique == pytest.approx(0.0785, abs=0.005)
    assert gap(rows, ROWS_2022) < 0.035
    assert gap(lookups, LOOKUPS_2022) < 0.045


def test_criteo_has_the_cardinalities_and_the_unique_ratio():
    data = load("synthetic:criteo")
    assert tuple(table.num_embeddings for table in data.tables) == CRITEO_CARDINALITIES
    unique = reuse(next(data.train(7_500)))[2]
    assert unique == pytest.approx(0.184, abs=0.02)
    capped = load("synthetic:criteo", max_rows=1000)
    assert max(table.num_embeddings for table in capped.tables) == 1000
    batch = next(capped.train(1000))
    assert batch.sparse.lengths().eq(1).all()
    assert batch.sparse.values().max() < 1000


def test_batches_are_a_function_of_seed_and_number():
    data = load("synthetic:zipf:0.95", tables=3, rows=10**12, pooling_factor=4.5)
    batches = list(islice(data.train(256), 5))
    assert same(next(data.train(256, start_batch=4)), batches[4])
    assert same(
        next(load("synthetic:zipf:0.95", tables=3, rows=10**12, pooling_factor=4.5).train(256)), batches[0]
    )
    assert not same(batches[0], batches[1])
    assert not same(
        next(load("synthetic:zipf:0.95", tables=3, rows=10**12, pooling_factor=4.5, seed=1).train(256)),
        batches[0],
    )
    assert not same(next(data.test(256)), batches[0])
    assert not torch.equal(batches[0].sparse["t0"].values()[:200], batches[0].sparse["t1"].values()[:200])


def test_examples_bound_an_epoch():
    data = load("synthetic:zipf:0.95:2.7", tables=2, rows=1000, examples=1000)
    assert [len(batch) for batch in data.train(400, epochs=2)] == [400, 400, 200] * 2
    assert [len(batch) for batch in data.train(400, epochs=2, start_batch=5)] == [200]
    assert data.num_test == 100
    assert sum(len(batch) for batch in data.test(64)) == 100


def test_labels_can_be_learned():
    data = load("synthetic:zipf:1.1", tables=4, rows=200)
    batches = list(islice(data.train(2000), 60))
    weights = torch.zeros(4, 200, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=0.05)
    losses = []
    for batch in batches:
        ids = batch.sparse.values().view(4, -1)
        logits = weights.gather(1, ids).sum(0) + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < losses[0] - 0.08


def test_drift_changes_the_ids_in_play():
    steady = load("synthetic:meta2021", tables=1, drift=0.0)
    drifting = load("synthetic:meta2021", tables=1, drift=0.1)
    assert same(next(steady.train(512)), next(drifting.train(512)))

    def ids(data, number):
        return set(next(data.train(20_000, start_batch=number)).sparse.values().tolist())

    far = len(ids(drifting, 0) & ids(drifting, 20))
    assert far < 0.05 * len(ids(drifting, 0))
    assert len(ids(steady, 0) & ids(steady, 20)) > 0.3 * len(ids(steady, 0))


def test_mixed_tables_differ():
    data = load("synthetic:mixed", tables=40, max_rows=10**6)
    rows = [table.num_embeddings for table in data.tables]
    assert min(rows) < 1000 < 100_000 < max(rows) <= 10**6
    lengths = next(data.train(64)).sparse.lengths().view(40, 64).float().mean(1)
    assert lengths.min() < 3 < 30 < lengths.max() <= 199


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("synthetic:zipf:0.95", {"rows": 0}, "rows must be"),
        ("synthetic:zipf:0.95", {"tables": 0}, "at least one table"),
        ("synthetic:zipf:0.95", {"pooling_factor": 101}, "pooling_factor must be"),
        ("synthetic:zipf:-1", {}, "popularity needs"),
        ("synthetic:zipf:nan", {}, "popularity needs"),
        ("synthetic:zipf:much", {}, "takes numbers"),
        ("synthetic:zipf:1:2:3", {}, "takes 2 numbers"),
        ("synthetic:meta2021", {"drift": 2.0}, "drift is a share"),
        ("synthetic:criteo", {"rows": 5}, "does not take rows; it takes max_rows, examples"),
        ("synthetic:criteo", {"path": "/tmp"}, "does not take path"),
        ("synthetic:weibull", {}, "known are flights"),
        ("synthetic", {}, "known are flights"),
        ("fights", {}, "known are flights"),
        ("flights:2", {}, "known are flights"),
        ("flights", {"rows": 7}, "does not take rows; it takes path"),
    ],
)
def test_wrong_names_and_options(spec, options, words):
    with pytest.raises(ConfigError, match=words):
        load(spec, **options)


def test_wrong_counts():
    data = load("synthetic:zipf:1", rows=10)
    with pytest.raises(ValueError, match="batch_size"):
        data.train(0)
    with pytest.raises(ValueError, match="negative"):
        data.train(1, start_batch=-1)
