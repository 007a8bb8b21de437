"""Metrics of clicks and of retrieval equal scikit-learn's, in any portions and over ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from tests.sharding.ranks import run
from tierstore.errors import InputError
from tierstore.integrations.torchmetrics import (
    GroupedAUC,
    LogLoss,
    NormalizedEntropy,
    click_metrics,
    retrieval_metrics,
)


def examples(seed: int, count: int = 900) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    target = rng.random(count) < 0.3
    preds = 1 / (1 + np.exp(-(rng.normal(size=count) + target)))
    indexes = (20 * rng.random(count) ** 2).astype(np.int64)
    target &= indexes != 3  # a group without positives
    preds[::7] = 0.25  # ties
    return {
        "preds": torch.from_numpy(preds.astype(np.float32)),
        "target": torch.from_numpy(target.astype(np.int64)),
        "indexes": torch.from_numpy(indexes),
    }


def expected_of(data: dict[str, torch.Tensor]) -> dict[str, float]:
    preds, target, indexes = (value.numpy() for value in data.values())
    share = target.mean()
    aucs, sizes = [], []
    for group in np.unique(indexes):
        inside = indexes == group
        if 0 < target[inside].sum() < inside.sum():
            aucs.append(roc_auc_score(target[inside], preds[inside]))
            sizes.append(inside.sum())
    return {
        "log_loss": log_loss(target, preds),
        "normalized_entropy": log_loss(target, preds) / log_loss(target, np.full(len(target), share)),
        "auc": roc_auc_score(target, preds),
        "gauc": np.average(aucs, weights=sizes),
    }


def part(data: dict[str, torch.Tensor], first: int, end: int) -> dict[str, torch.Tensor]:
    return {name: value[first:end] for name, value in data.items()}


def check(found: dict[str, torch.Tensor], data: dict[str, torch.Tensor]) -> None:
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected_of(data), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("portion", [1000, 70])
def test_clicks_equal_sklearn(seed: int, portion: int) -> None:
    data, metrics = examples(seed), click_metrics(groups=True)
    for first in range(0, 900, portion):
        metrics.update(**part(data, first, first + portion))
    check(metrics.compute(), data)
    metrics.reset()
    metrics.update(**examples(seed + 50))
    check(metrics.compute(), examples(seed + 50))


def test_without_groups_there_are_no_indexes() -> None:
    data, metrics = examples(0), click_metrics()
    metrics.update(data["preds"], data["target"])
    assert metrics.compute().keys() == {"log_loss", "normalized_entropy", "auc"}


@pytest.mark.parametrize("k", [1, 5, 50])
def test_retrieval_equals_sklearn(k: int) -> None:
    rng = np.random.default_rng(k)
    scores = rng.random((12, 30)).astype(np.float32)
    relevant = rng.random((12, 30)) < 0.15
    relevant[4] = False  # a query without a relevant item is left out
    metrics = retrieval_metrics(k)
    for query in range(12):
        metrics.update(
            torch.from_numpy(scores[query]),
            torch.from_numpy(relevant[query]),
            indexes=torch.full((30,), query),
        )
    found = {name: value.item() for name, value in metrics.compute().items()}
    asked = relevant.any(axis=1)
    top = np.argsort(-scores, axis=1)[:, :k]
    recalls = np.take_along_axis(relevant, top, axis=1).sum(axis=1)[asked] / relevant.sum(axis=1)[asked]
    assert found == pytest.approx(
        {f"recall@{k}": recalls.mean(), f"ndcg@{k}": ndcg_score(relevant[asked], scores[asked], k=k)},
        rel=1e-5,
    )


def over_ranks() -> None:
    data, rank = examples(5), dist.get_rank()
    metrics = click_metrics(groups=True)
    first, end = [(0, 250), (250, 900)][rank]
    for begin in range(first, end, 100):
        metrics.update(**part(data, begin, min(begin + 100, end)))
    check(metrics.compute(), data)


def test_ranks_add_up() -> None:
    run(2, over_ranks)


def test_sums_are_exact_enough_for_long_trainings() -> None:
    metric = LogLoss()
    metric.update(torch.tensor([0.5]), torch.tensor([1]))
    for _ in range(10):
        metric.update(torch.full((100_000,), 0.9), torch.ones(100_000))
    each = -math.log(float(np.float32(0.9)))
    assert metric.compute().item() == pytest.approx((math.log(2) + 1e6 * each) / 1_000_001, rel=1e-9)


def test_certain_predictions_are_finite() -> None:
    metric = LogLoss()
    preds, target = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])
    metric.update(preds, target)
    assert metric.compute().item() == pytest.approx(log_loss(target.numpy(), preds.numpy()), rel=1e-6)


def test_what_has_no_value_is_nan() -> None:
    for metric in (LogLoss(), NormalizedEntropy(), GroupedAUC()):
        with pytest.warns(UserWarning, match="before the ``update`` method"):
            assert metric.compute().isnan()
    entropy = NormalizedEntropy()
    entropy.update(torch.tensor([0.5, 0.4]), torch.tensor([1, 1]))
    assert entropy.compute().isnan()


@pytest.mark.parametrize(
    ("preds", "target", "said"),
    [
        ([0.5, 1.5], [0, 1], r"from 0.5 to 1.5: take torch.sigmoid"),
        ([0.5, math.nan], [0, 1], "lower the learning rate"),
        ([0.5, 0.5], [0, 2], "labels must be 0 or 1, not torch.int64 from 0 to 2"),
        ([0.5], [0, 1], "1 predictions and 2 labels"),
    ],
)
def test_mistakes_are_named(preds: Any, target: Any, said: str) -> None:
    for metric, more in ((LogLoss(), {}), (GroupedAUC(), {"indexes": torch.tensor([1, 1])})):
        with pytest.raises(InputError, match=said):
            metric.update(torch.tensor(preds), torch.tensor(target), **more)


def test_groups_are_integers_one_per_example() -> None:
    for wrong in (torch.tensor([1]), torch.tensor([1.0, 2.0])):
        with pytest.raises(InputError, match="indexes must be 2 integers"):
            GroupedAUC().update(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), wrong)


def test_without_torchmetrics_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torchmetrics'] = None\n"
        "from tierstore.errors import MissingPackageError\n"
        "try:\n    import tierstore.integrations.torchmetrics\n"
        "except MissingPackageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install torchmetrics" in done.stdout
