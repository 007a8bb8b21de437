"""The metrics of clicks and of retrieval that recommenders are judged by, as metrics of torchmetrics.

The metrics add up over batches, and over the ranks of a job. What torchmetrics has is torchmetrics' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tierstore.errors import InputError
from tierstore.integrations.required import need

need("torchmetrics")

from torchmetrics import Metric, MetricCollection  # noqa: E402
from torchmetrics.classification import BinaryAUROC  # noqa: E402
from torchmetrics.functional.classification import binary_auroc  # noqa: E402
from torchmetrics.retrieval import RetrievalNormalizedDCG, RetrievalRecall  # noqa: E402


def click_metrics(groups: bool = False) -> MetricCollection:
    """Make a collection of ``log_loss``, ``normalized_entropy`` and ``auc``.

    Update it with ``preds``, probabilities float (n,), and ``target``, 0 or 1 (n,). With ``groups`` it has
    ``gauc``, too, and is updated with ``indexes``, integers (n,): the group of each example, such as its
    user. ``auc`` and ``gauc`` keep all examples until ``reset()``.
    """
    metrics: dict[str, Metric] = {
        "log_loss": LogLoss(),
        "normalized_entropy": NormalizedEntropy(),
        "auc": BinaryAUROC(thresholds=None),
    }
    return MetricCollection({**metrics, "gauc": GroupedAUC()} if groups else metrics)


def retrieval_metrics(k: int = 10) -> MetricCollection:
    """Make a collection of ``recall@k`` and ``ndcg@k``, means over the queries that have a relevant item.

    Update it with ``preds``, scores float (n,), ``target``, 1 for relevant items and 0 for others (n,), and
    ``indexes``, integers (n,): the query of each item. Both keep all items until ``reset()``.
    """
    chosen: dict[str, Any] = {"top_k": k, "empty_target_action": "skip"}
    return MetricCollection(
        {f"recall@{k}": RetrievalRecall(**chosen), f"ndcg@{k}": RetrievalNormalizedDCG(**chosen)}
    )


class LogLoss(Metric):
    """Mean binary cross entropy of probabilities, in nats; NaN without examples.

    Probabilities are kept away from 0 and 1 by the precision of their dtype, as in scikit-learn. Sums are
    float64.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    loss: Tensor
    positives: Tensor
    examples: Tensor

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.float64, device=torch.get_default_device())
        for name in ("loss", "positives", "examples"):
            self.add_state(name, zero.clone(), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add examples. Raises InputError for values that are no probabilities, or no labels."""
        preds, target = _checked(preds, target)
        least = torch.finfo(preds.dtype).eps
        chances, labels = preds.double().clamp(least, 1 - least), target.double()
        self.loss -= (labels * chances.log() + (1 - labels) * (-chances).log1p()).sum()
        self.positives += labels.sum()
        self.examples += labels.numel()

    def compute(self) -> Tensor:
        return self.loss / self.examples


class NormalizedEntropy(LogLoss):
    """The log loss, divided by that of predicting the share of positives for every example; NaN if all labels
    are equal. X. He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014.
    """

    def compute(self) -> Tensor:
        share = self.positives / self.examples
        entropy = -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share))
        return torch.where(entropy > 0, super().compute() / entropy, torch.nan)


class GroupedAUC(Metric):
    """The mean AUC of groups, such as users, by their number of examples; NaN if no group has both labels.

    Groups whose labels are all equal have no AUC and are left out. H. Zhu et al., "Optimized Cost per Click
    in Taobao Display Advertising", KDD 2017.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    preds: list[Tensor]
    target: list[Tensor]
    indexes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("preds", "target", "indexes"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, indexes: Tensor) -> None:
        """Add examples with their groups. Raises InputError for values of another kind or number."""
        preds, target = _checked(preds, target)
        if indexes.numel() != preds.numel() or indexes.is_floating_point():
            raise InputError(f"indexes must be {preds.numel()} integers, not {_described(indexes)}")
        self.preds.append(preds)
        self.target.append(target)
        self.indexes.append(indexes.flatten())

    def compute(self) -> Tensor:
        if not len(self.preds):
            return torch.tensor(torch.nan, device=self.device)
        preds, target, indexes = map(_joined, (self.preds, self.target, self.indexes))
        order = indexes.argsort(stable=True)
        _, counts = indexes.unique(return_counts=True)
        total, examples = 0.0, 0
        parts = (part[order].split(counts.tolist()) for part in (preds, target))
        for scores, labels in zip(*parts, strict=True):
            positives = int(labels.sum())
            if 0 < positives < len(labels):
                total += float(binary_auroc(scores, labels, validate_args=False)) * len(labels)
                examples += len(labels)
        return torch.tensor(total / examples if examples else torch.nan, device=self.device)


def _joined(state: list[Tensor] | Tensor) -> Tensor:
    """Return a state as one tensor; over ranks torchmetrics has joined it already."""
    return state if isinstance(state, Tensor) else torch.cat(state)


def _checked(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels in one dimension, the labels as integers."""
    preds, target = preds.detach().flatten(), target.detach().flatten()
    if preds.numel() != target.numel():
        raise InputError(f"there are {preds.numel()} predictions and {target.numel()} labels; give as many")
    if not preds.is_floating_point() or not ((preds >= 0) & (preds <= 1)).all():
        raise InputError(
            f"predictions must be probabilities, 0 to 1, not {_described(preds)}: take "
            "torch.sigmoid(logits); lower the learning rate if they are NaN"
        )
    if not ((target == 0) | (target == 1)).all():
        raise InputError(f"labels must be 0 or 1, not {_described(target)}")
    return preds, target.long()


def _described(values: Tensor) -> str:
    if not values.numel():
        return f"{values.dtype} of shape {tuple(values.shape)}"
    return f"{values.dtype} from {values.min().item():g} to {values.max().item():g}"
