"""The rows of a collection's features as jagged tensors, cut out of whole tensors once they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.modules.features import Features
from tierstore.modules.inputs import FeatureLookup
from tierstore.sparse import JaggedTensor, KeyedJaggedTensor, jagged_by_name


class JaggedRows:
    """The rows of every feature of ``keyed``, by its number: a source of JaggedTensors.

    ``rows`` returns the rows (ids, dim) of each feature; they and all else are on ``device``. What a user
    never asks for is never cut. ``with_ids``: the ids are the weights.
    """

    _whole_ids: tuple[Tensor, list[int]] | None = None
    _bags: list[int] | None = None  # of every key, where they differ
    _cut_rows: Sequence[Tensor] | None = None
    _cut_lengths: Sequence[Tensor] | None = None
    _cut_ids: Sequence[Tensor] | None = None

    def __init__(
        self,
        features: Features,
        keyed: KeyedJaggedTensor,
        rows: Callable[[], Sequence[Tensor]],
        device: str,
        with_ids: bool,
    ) -> None:
        self._features, self._keyed, self._rows = features, keyed, rows
        # The caller may give the batch other tensors before anybody asks for these.
        lengths = keyed.lengths()
        self._whole_lengths = lengths if device == "cpu" else lengths.to(device)
        if keyed.variable_stride_per_key():
            self._bags = keyed.stride_per_key()
        if with_ids:
            self._whole_ids = keyed.values().to(device), keyed.length_per_key()

    def by_output(self) -> dict[str, JaggedTensor]:
        """Return the features' rows with the lengths of their bags by the features' names in the output."""
        return jagged_by_name(self._features.number_of, self)

    def values(self, number: int) -> Tensor:
        if self._cut_rows is None:
            self._cut_rows = self._rows()
        return self._cut_rows[number]

    def lengths(self, number: int) -> Tensor:
        if self._cut_lengths is None:
            keys, lengths, bags = self._features.keys_of(self._keyed), self._whole_lengths, self._bags
            count = len(self._keyed.keys())
            cut = lengths.split([lengths.numel() // count] * count if bags is None else bags)
            self._cut_lengths = [cut[key] for key in keys]
        return self._cut_lengths[number]

    def weights(self, number: int) -> Tensor | None:
        if self._whole_ids is None:
            return None
        if self._cut_ids is None:
            cut = self._whole_ids[0].split(self._whole_ids[1])
            self._cut_ids = [cut[key] for key in self._features.keys_of(self._keyed)]
        return self._cut_ids[number]


def rows_by_feature(lookup: FeatureLookup, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return for every feature of ``lookup`` its share (ids, dim) of the parts' ``outputs``.

    The shares have gradients where the outputs have them, whatever the mode of the caller is."""
    pieces: list[Any] = [None] * len(lookup.counts)
    for members, output in zip(lookup.features, outputs, strict=True):
        with torch.inference_mode(False), torch.set_grad_enabled(output.requires_grad):
            # one split node, since slices would each be a full gradient in the backward pass
            cut = output.split([lookup.counts[m] for m in members])
        for number, piece in zip(members, cut, strict=True):
            pieces[number] = piece
    return pieces
