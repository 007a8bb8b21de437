from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from tierstore.models import AUC, binary_auc


@given(st.lists(st.tuples(st.booleans(), st.integers(-5, 5)), min_size=1, max_size=60), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_equals_sklearn_with_ties_in_any_portions(examples, portion):
    labels = np.array([label for label, _ in examples], dtype=np.float32)
    scores = np.array([score for _, score in examples], dtype=np.float32) / 7
    metric = AUC()
    for first in range(0, len(labels), portion):
        metric.update(torch.from_numpy(labels[first:][:portion]), torch.from_numpy(scores[first:][:portion]))
    if len(set(labels)) == 1:
        assert math.isnan(metric.value())
    else:
        assert metric.value() == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
        assert binary_auc(labels, scores) == metric.value()


def test_stream_of_many():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 300_000)
    scores = (rng.normal(size=300_000) + 0.5 * labels).astype(np.float32)
    metric, compact = AUC(), AUC(exact=20_000)
    for part in np.array_split(np.arange(300_000), 30):
        metric.update(labels[part], scores[part])
        compact.update(labels[part], scores[part])
    expected = roc_auc_score(labels, scores)
    assert metric.value() == pytest.approx(expected, abs=1e-12)
    assert compact.value() == pytest.approx(expected, abs=1e-4)
    assert len(compact._scores) <= 20_000


def test_value_does_not_end_the_stream():
    metric = AUC().update(np.array([0, 1]), np.array([0.1, 0.2]))
    assert metric.value() == 1.0
    assert metric.update(np.array([0, 1]), np.array([0.9, 0.0])).value() == 0.25


def test_bad_values():
    with pytest.raises(ValueError, match="NaN"):
        binary_auc(np.array([0, 1]), np.array([0.0, math.nan]))
    with pytest.raises(ValueError, match="0 or 1"):
        binary_auc(np.array([0, 2]), np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match="one shape"):
        binary_auc(np.array([0, 1]), np.array([0.0]))
    assert math.isnan(AUC().value())


def test_the_auc_of_parts_is_that_of_the_whole():
    generator = np.random.default_rng(5)
    labels, scores = generator.integers(0, 2, 3000), generator.integers(0, 500, 3000) / 500
    parts = [AUC().update(labels[k::3], scores[k::3]) for k in range(3)]
    assert parts[0].joined(part.state_dict() for part in parts[1:]) == binary_auc(labels, scores)
    assert parts[0].value() == binary_auc(labels[::3], scores[::3]), "joining changes none of them"
    few = [AUC(exact=64).update(labels[k::3], scores[k::3]) for k in range(3)]
    assert few[0].joined(part.state_dict() for part in few[1:]) == pytest.approx(
        binary_auc(labels, scores), abs=0.02
    )
