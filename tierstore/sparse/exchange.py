"""What ranks send one another of KeyedJaggedTensors, by torchrec's methods: each gets some of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierstore.errors import InputError
from tierstore.sparse.per_key import FiguresPerKey
from tierstore.sparse.rearrange import Parts, segment_bounds

_INIT = "KeyedJaggedTensor.dist_init"


class SentByKey(FiguresPerKey):
    """The parts that are sent, in one order: lengths, values, strides where keys differ, weights if any."""

    def dist_labels(self) -> list[str]:
        """Return the names of the tensors that ranks exchange."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors that ranks exchange, in the order of :meth:`dist_labels`."""
        tensors = [self.lengths(), self._values]
        if self.variable_stride_per_key():
            tensors.append(torch.tensor(self.stride_per_key(), dtype=torch.int64, device=self.device()))
        if self._weights is not None:
            tensors.append(self._weights)
        return tensors

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return for each tensor of :meth:`dist_tensors` how many of its entries each rank gets.

        ``key_splits``: how many keys each rank gets, in their order. Raises InputError if there are not so
        many keys.
        """
        bounds = segment_bounds(self, key_splits, "dist_splits: splits")
        bags, values = (
            [sum(of_keys[begin:end]) for begin, end in bounds]
            for of_keys in (self.stride_per_key(), self.length_per_key())
        )
        splits = [bags, values]
        if self.variable_stride_per_key():
            splits.append(list(key_splits))
        if self._weights is not None:
            splits.append(values)
        return splits


def received(
    keys: list[str],
    tensors: Sequence[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: Sequence[int] | None,
    stagger: int,
) -> Parts:
    """Join what the ranks have sent; see KeyedJaggedTensor.dist_init."""
    most = 4 if variable_stride_per_key else 3
    if not most - 1 <= len(tensors) <= most:
        needed = f"give the tensors of dist_labels, {most - 1} or {most}"
        raise InputError(f"{_INIT}: {len(tensors)} tensors; {needed}")
    lengths, values = tensors[0].reshape(-1), tensors[1]
    weights = tensors[-1] if len(tensors) == most else None
    strides: Tensor | None = None
    if variable_stride_per_key:
        sent = tensors[2]
        strides = _strides_by_key(keys, sent, num_workers, stagger)
        lengths, values, weights = _in_order(recat, sent.long(), lengths, values, weights)
    elif stride_per_rank is None:
        raise InputError(f"{_INIT}: stride_per_rank is None; give the batch size of every rank")
    elif recat is not None and any(stride_per_rank):
        # with batch sizes that differ, recat has every bag; else it has every key of every rank
        stride = stride_per_rank[0] if len(set(stride_per_rank)) == 1 else 1
        bags = torch.full((lengths.numel() // stride,), stride, dtype=torch.int64, device=lengths.device)
        lengths, values, weights = _in_order(recat, bags, lengths, values, weights)
    return Parts(
        keys=keys,
        values=values,
        weights=weights,
        lengths=lengths,
        stride=None if stride_per_rank is None or variable_stride_per_key else sum(stride_per_rank),
        stride_per_key_per_rank=strides,
        length_per_key=None,
        inverse_indices=None,
    )


def _strides_by_key(keys: Sequence[str], sent: Tensor, num_workers: int, stagger: int) -> Tensor:
    """Return the bags of every key, a row each, and rank."""
    if sent.numel() != num_workers * len(keys):
        raise InputError(
            f"{_INIT}: {sent.numel()} strides; there must be one for each of {len(keys)} keys of "
            f"{num_workers} ranks"
        )
    strides = sent.view(num_workers, len(keys)).T.cpu()
    if not strides.numel():
        return strides.new_zeros(len(keys), 1)
    if stagger > 1:
        strides = strides[:, torch.arange(num_workers, device="cpu").view(stagger, -1).T.reshape(-1)]
    return strides


def _in_order(
    recat: Tensor | None, bags: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return lengths, values and weights in another order of segments. ``bags``: of each segment."""
    if recat is None:
        return lengths, values, weights
    order = recat.long()
    if int(bags.sum()) != lengths.numel():
        raise InputError(f"{_INIT}: {lengths.numel()} lengths do not fit the batch sizes that are given")
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < bags.numel():
        raise InputError(f"{_INIT}: recat names segments that are not among the {bags.numel()} given")
    ends = torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))[
        torch.nn.functional.pad(bags.cumsum(0), (1, 0))
    ]
    at = _positions(order, ends.diff())
    moved = None if weights is None else weights[at]
    return lengths[_positions(order, bags)], values[at], moved


def _positions(order: Tensor, sizes: Tensor) -> Tensor:
    """Return where the entries of segments in ``order`` are. ``sizes``: of the segments, side by side."""
    begins, own = (sizes.cumsum(0) - sizes)[order], sizes[order]
    shift = begins - (own.cumsum(0) - own)
    return torch.arange(int(own.sum()), device=sizes.device) + shift.repeat_interleave(own)
