"""Readable forms of jagged and keyed tensors; long ones are cut, so that printing a batch is always safe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

MAX_BAGS = 100
MAX_VALUES = 100


def bags_text(values: Tensor, offsets: Sequence[int]) -> str:
    """Write the bags between consecutive offsets as ``[[1, 2], [], [3]]``."""
    shown = offsets[: MAX_BAGS + 1]
    bags = [values_text(values[start:end]) for start, end in pairwise(shown)]
    rest = len(offsets) - len(shown)
    return _joined(bags, f"... {rest:,} more bags" if rest else "")


def key_text(key: str, values: Tensor, weights: Tensor | None, offsets: Sequence[int]) -> str:
    """Write one key of a KeyedJaggedTensor with its bags, and their weights if there are any."""
    bags = bags_text(values, offsets)
    if weights is None:
        return f'    "{key}": {bags}'
    rest = bags_text(weights, offsets)
    return f'    "{key}": {{\n        "values": {bags},\n        "weights": {rest}\n    }}'


def values_text(values: Tensor) -> str:
    """Write a tensor of any shape as ``[1, 2, 3]``."""
    shown = values[:MAX_VALUES].tolist()
    rest = values.size(0) - len(shown)
    return _joined([str(value) for value in shown], f"... {rest:,} more" if rest else "")


def summary_text(values: Tensor, weights: Tensor | None = None) -> str:
    """Write dtypes, shapes and device for ``__repr__``, also of a pytree walk's stand-ins for tensors."""
    if not isinstance(values, Tensor):
        return f"values={values!r}"
    text = f"values={_dtype(values)}{list(values.shape)}"
    if isinstance(weights, Tensor):
        text += f", weights={_dtype(weights)}{list(weights.shape)}"
    return f"{text}, device={values.device}"


def _joined(items: list[str], rest: str) -> str:
    return "[" + ", ".join([*items, rest] if rest else items) + "]"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
