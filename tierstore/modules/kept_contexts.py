"""What a lookup operator keeps for its backward operator, tied to the memory of a tensor in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from tierstore.cache.pinned_rows import Rows
from tierstore.errors import GradientError
from tierstore.modules.handles import Looked
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.row_updates import Updates

_numbers = count(1)


class TracedContext:
    """The context of a lookup in a graph; autograd's own contexts have the same attributes.

    ``needs_input_grad``: of the arguments of the autograd function."""

    module: Updates | None
    lookup: FeatureLookup
    argmaxes: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    weighted: Sequence[tuple[Rows | None, tuple[torch.device, torch.dtype]]]

    def __init__(self, owner: Looked, needs_input_grad: tuple[bool, ...]) -> None:
        self._owner, self.needs_input_grad = owner, needs_input_grad

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save nothing: the graph itself has the tensors."""

    def reaches_rows(self) -> bool:
        """Return False in a backward pass for other inputs of the graph alone, such as per-sample weights or
        dense parameters: such a pass trains no rows, though a compiler's graph runs as a whole."""
        node = torch._C._current_autograd_node()
        if node is None:
            return True
        anchors = self._owner.anchors()
        for function, _ in node.next_functions:
            variable = getattr(function, "variable", None)
            if function is not None and any(variable is anchor for anchor in anchors):
                return torch._C._will_engine_execute_node(function)
        return True


class _Memory(np.ndarray):
    """The memory of a tensor; torch frees it with the last tensor that has it."""

    context: TracedContext


_kept: WeakValueDictionary[int, _Memory] = WeakValueDictionary()


def kept_tensor(context: TracedContext | None) -> Tensor:
    """Return a tensor, int64 (1,), with which ``context`` lives and ends."""
    if context is None:
        return torch.zeros(1, dtype=torch.int64, device="cpu")
    number = next(_numbers)
    memory = np.array([number], np.int64).view(_Memory)
    memory.context = context
    _kept[number] = memory
    return torch.from_numpy(memory)


def context_of(kept: Tensor) -> TracedContext | None:
    """Return the context that lives with ``kept``; None if there was none.

    Raises GradientError if it is gone: something has copied the tensor and dropped the graph's own."""
    number = int(kept)
    if not number:
        return None
    memory = _kept.get(number)
    if memory is None:
        raise GradientError(
            "the rows of a compiled lookup were released before its backward pass, since tensors that its "
            "graph saved were copied, as torch.autograd.graph.save_on_cpu() does. Leave such hooks out, or "
            "do not compile the model"
        )
    return memory.context
