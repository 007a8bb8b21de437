"""Joins samples or small batches into one batch; torch's default_collate uses this for our types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import _utils

from tierstore.errors import InputError
from tierstore.sparse.jagged import JaggedTensor
from tierstore.sparse.keyed_jagged import KeyedJaggedTensor


def collate_jagged(batch: Sequence[JaggedTensor], *, collate_fn_map: Any = None) -> JaggedTensor:
    """Join the bags of all samples, one JaggedTensor after another."""
    weighted = [jagged.weights_or_none() is not None for jagged in batch]
    if any(weighted) and not all(weighted):
        raise InputError(
            f"collate: sample {weighted.index(True)} has weights but sample {weighted.index(False)} has none"
        )
    return JaggedTensor(
        torch.cat([jagged.values() for jagged in batch]),
        torch.cat([jagged.weights() for jagged in batch]) if all(weighted) else None,
        lengths=torch.cat([jagged.lengths() for jagged in batch]),
    )


def collate_keyed_jagged(
    batch: Sequence[KeyedJaggedTensor], *, collate_fn_map: Any = None
) -> KeyedJaggedTensor:
    """Join the bags of each key; all samples must have the same keys and no inverse indices."""
    keys = batch[0].keys()
    for number, keyed in enumerate(batch):
        if keyed.keys() != keys:
            raise InputError(f"collate: sample {number} has keys {keyed.keys()} but the first has {keys}")
        if keyed.inverse_indices_or_none() is not None:
            raise InputError(f"collate: sample {number} has inverse indices; expand them before collating")
    return KeyedJaggedTensor.from_jt_dict(
        {key: collate_jagged([keyed[key] for keyed in batch]) for key in keys}
    )


_utils.collate.default_collate_fn_map[JaggedTensor] = collate_jagged
_utils.collate.default_collate_fn_map[KeyedJaggedTensor] = collate_keyed_jagged
