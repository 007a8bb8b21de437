"""Area under the ROC curve: the chance that a positive example scores above a negative example; ties count
half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

Values = torch.Tensor | np.ndarray


def binary_auc(labels: Values, scores: Values) -> float:
    """Return the exact AUC of ``scores`` (n,) for ``labels`` (n,) of 0 and 1; NaN if all labels are equal."""
    return AUC().update(labels, scores).value()


class AUC:
    """AUC of a stream of examples.

    The AUC is exact while there are up to ``exact`` distinct scores. Then pairs of neighbouring scores are
    merged, so memory is bounded by 24 bytes times ``exact``. The error is at most the share of the pairs that
    merging made equal.
    """

    def __init__(self, exact: int = 10_000_000) -> None:
        self._exact = exact
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._scores = np.empty(0)
        self._counts = np.empty((2, 0))  # of negatives and of positives, per distinct score
        self._waiting = 0

    def update(self, labels: Values, scores: Values) -> AUC:
        """Add examples, labels (n,) and scores (n,); return self. ValueError for NaN and for odd labels."""
        label, score = _flat(labels), _flat(scores)
        if label.shape != score.shape:
            raise ValueError(f"labels and scores must have one shape, not {label.shape} and {score.shape}")
        if np.isnan(score).any():
            raise ValueError("scores contain NaN: training has diverged, so lower the learning rate")
        positive = label == 1
        if not (positive | (label == 0)).all():
            raise ValueError("labels must be 0 or 1")
        self._pending.append((score, positive))
        self._waiting += len(score)
        if self._waiting > max(1 << 16, len(self._scores)):  # so all merges take O(n log n)
            self._merge()
        return self

    def value(self) -> float:
        """Return the AUC of all examples so far."""
        self._merge()
        negatives, positives = self._counts
        pairs = negatives.sum() * positives.sum()
        if pairs == 0:
            return float("nan")
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + negatives / 2)).sum() / pairs)

    def joined(self, others: Iterable[Mapping[str, np.ndarray]]) -> float:
        """Return the AUC of these examples and of the examples of other AUCs, by their state dicts."""
        self._merge()
        both = AUC(self._exact)
        both._scores, both._counts = self._scores, self._counts
        for state in others:
            other = AUC(self._exact)
            other.load_state_dict(state)
            other._merge()
            scores = np.concatenate([both._scores, other._scores])
            both._take(scores, np.concatenate([both._counts, other._counts], axis=1))
        return both.value()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state so far; another AUC that loads it goes on to the same bits."""
        waiting = self._pending or [(np.empty(0), np.empty(0, bool))]
        scores, positive = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        return {"scores": self._scores, "counts": self._counts, "waiting": scores, "positive": positive}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take the state of another AUC of the same ``exact``."""
        self._scores, self._counts = state["scores"], state["counts"]
        self._waiting = len(state["waiting"])
        self._pending = [(state["waiting"], state["positive"])] if self._waiting else []

    def _merge(self) -> None:
        if not self._pending:
            return
        scores = np.concatenate([self._scores, *(score for score, _ in self._pending)])
        new = np.concatenate([positive for _, positive in self._pending])
        weights = np.concatenate([self._counts, [~new, new]], axis=1)
        self._pending, self._waiting = [], 0
        self._take(scores, weights)

    def _take(self, scores: np.ndarray, weights: np.ndarray) -> None:
        """Take scores (n,) that have ``weights`` (2, n) negatives and positives."""
        self._scores, group = np.unique(scores, return_inverse=True)
        self._counts = np.stack([np.bincount(group, weight, len(self._scores)) for weight in weights])
        while len(self._scores) > self._exact:
            starts = np.arange(0, len(self._scores), 2)
            self._counts = np.add.reduceat(self._counts, starts, axis=1)
            self._scores = self._scores[starts]


def _flat(values: Values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy().reshape(-1)
    return np.asarray(values, dtype=np.float64).reshape(-1)
