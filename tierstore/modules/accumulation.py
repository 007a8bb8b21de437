"""``tierstore.accumulate``: several backward passes, one update of the rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tierstore import _core, optim
from tierstore.errors import ConfigError
from tierstore.modules.base import TieredModule
from tierstore.modules.inputs import NO_PADDING, FeatureLookup
from tierstore.modules.joining import Pass, joined
from tierstore.modules.lookup import PooledGradients, SequenceGradients
from tierstore.modules.parts import Lookup
from tierstore.modules.row_updates import (
    Gradients,
    PreparedUpdate,
    make_updates,
    prepared_update,
    trained_csr,
    update_args,
)
from tierstore.optim.fused import AppliedOptimizer

logger = logging.getLogger("tierstore")

_SUMS = optim.SGD(lr=1.0).step_args()
"""A step whose squares are those of the gradients."""
_WITNESS = 2.0**-13
"""The second element of a shown gradient, by the first. A factor changes both alike, bit for bit."""
_SMALLEST = torch.finfo(torch.float32).tiny
"""Below it a factor rounds the second element more than the first."""


@contextmanager
def accumulate(model: nn.Module | Sequence[nn.Module]) -> Iterator[Accumulation]:
    """Collect the gradients of the block's backward passes, and update the rows once, at its end.

    The update is that of one batch with the examples of all passes. The update has the same bits if the
    gradients of the lookups' outputs have: divide the loss of each of k passes by k, as for dense parameters.
    A table that a pass looks up several times is updated once, too, as in torch.

    The block yields a torch optimizer of the rows: ``step()`` updates them now, ``zero_grad()`` drops the
    kept gradients, ``parameters()`` has a tensor per module whose gradient is the norm of the gradients of
    its rows: ``torch.nn.utils.clip_grad_norm_([*model.parameters(), *rows.parameters()], limit)`` clips rows
    and dense parameters together. ``torch.amp.GradScaler`` works as with any optimizer:
    ``scaler.unscale_(rows)``, then ``scaler.step(rows)``, which divides by the scale, and skips the update if
    a gradient is not finite.

    An exception in the block drops the kept ids and gradients (``kept_bytes``); it changes no row. One that a
    signal handler raises during the update (Ctrl-C) leaves the rows of all modules as before or as after it.

    Sharded collections are updated as by one batch of all passes on the same ranks. All ranks make as many
    passes, and call ``step()`` and ``parameters()`` together; norms count the rows of all ranks.

    Raises ConfigError for a model without tiered modules, or that accumulates already, and GpuError for a GPU
    whose kernels for norms do not compile.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    modules = {id(m): m for one in models for m in one.modules() if isinstance(m, TieredModule)}
    rows = Accumulation(list(modules.values()))
    # In one native call, since after a signal's exception modules would go on to collect, and train no row.
    end = map(object.__setattr__, modules.values(), repeat("accumulation"), repeat(None))
    try:
        rows.begin()
        yield rows
        rows.step()
    finally:
        list(end)  # no signal comes before this call
        rows.zero_grad()


@dataclass
class _Kept:
    """The kept gradients of one module. ``shown``: a tensor whose gradient is the norm of the rows'
    gradients. The tensor is where the rows are: of a gradient on the CPU a GradScaler on a GPU may read a
    scale that is not there yet.
    """

    shown: Tensor
    passes: list[Pass] = field(default_factory=list)
    norm: float | None = None
    version: int = 0


class Accumulation(AppliedOptimizer):
    """An optimizer of a model's rows that updates them at ``step()``; see :func:`accumulate`.

    The update uses the hyperparameters of the modules' ``fused_optimizer``.
    """

    _step_supports_amp_scaling = True  # a GradScaler then leaves dividing and skipping to step()

    def __init__(self, modules: Sequence[TieredModule]) -> None:
        # torch's own constructor would compute the parameters, which are computed on demand here
        self.defaults = {}
        self.unscales = False
        self._kept = {module: _Kept(_shown_by(module)) for module in modules}
        if not modules:
            raise ConfigError("the model has no tiered module: it has no rows to accumulate gradients of")
        for module in modules:
            if module.accumulation is not None:
                raise ConfigError(
                    f"gradients of tables {', '.join(module.table_names())} are accumulated already; leave "
                    "the outer `with tierstore.accumulate(...)` first, or call step() of what it yields"
                )

    def begin(self) -> None:
        """Keep the gradients of the modules' backward passes. Devices get ready for their norms before."""
        for module in self._kept:
            tables = [] if module.frozen else map(module.engine.tables.__getitem__, module.table_numbers)
            module.engine.prepare({(table.embedding_dim, table.dtype, _SUMS.kind) for table in tables})
        for module in self._kept:
            module.accumulation = self

    def keep(self, module: Any, lookup: Lookup, gradients: Gradients) -> None:
        """Take the gradients of one backward pass of ``module``. Called by the backward pass."""
        assert isinstance(lookup, FeatureLookup)
        frozen = module.frozen_tables()  # another pass may train them
        parts = [replace(part, rows=None, frozen=[*part.frozen, *frozen]) for part in lookup.parts]
        kept = self._kept[module]
        kept.passes.append(Pass(FeatureLookup(parts, (), lookup.features, lookup.counts), _copied(gradients)))
        kept.norm = kept.shown.grad = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of ids and gradients that are kept until the update."""
        return sum(one.nbytes for kept in self._kept.values() for one in kept.passes)

    def parameters(self) -> list[Tensor]:
        """Return one tensor per module. The gradient of the tensor is the norm of the rows' gradients, NaN if
        one is not finite, None if there are none; scaling it scales the rows' gradients, too. A second
        element of the gradient, too small for any norm, shows other changes than a factor: these raise
        ConfigError in :meth:`step`."""
        for module, kept in self._kept.items():
            if kept.passes and kept.norm is None:
                kept.norm = _norm(module, kept.passes)
                kept.shown.grad = torch.full_like(kept.shown, kept.norm)
                kept.shown.grad[1] *= _WITNESS
                kept.norm, kept.version = kept.shown.grad[0].item(), kept.shown.grad._version
        return [kept.shown for kept in self._kept.values()]

    @property
    def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
        """One group, with :meth:`parameters`."""
        return [{"params": self.parameters()}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the kept gradients."""
        for kept in self._kept.values():
            kept.passes.clear()
            kept.norm = kept.shown.grad = None

    def step(self, closure: Callable[[], object] | None = None) -> object:  # type: ignore[override]
        """Update the rows by the kept gradients, once per module, and drop these gradients.

        Raises ConfigError if a GradScaler is in use and does not make this step.
        """
        found = super().step(closure)
        not_finite, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        self.unscales = not_finite is not None
        try:
            if not_finite is None or not float(not_finite):
                self._apply(1.0 if scale is None else float(scale))
        finally:
            self.unscales = False
            self.zero_grad()
        return found

    def _apply(self, scale: float) -> None:
        kept_of = {module: kept for module, kept in self._kept.items() if kept.passes}
        for module in kept_of:  # an error of one module leaves all modules as they are
            module.check_update()
            module.fused_optimizer.step_args(1)
        factors = [_factor(kept) / scale for kept in kept_of.values()]
        lookups: list[Lookup] = []
        updates: list[PreparedUpdate] = []
        try:
            for (module, kept), factor in zip(kept_of.items(), factors, strict=True):
                lookup, gradients = joined(kept.passes, _padding(module))
                if factor != 1.0:
                    gradients.multiply(factor)
                kept.passes.clear()
                lookups.append(lookup)
                lookup.acquire()
                updates.append(prepared_update(module, lookup.parts, gradients))
            make_updates(updates)
        finally:
            for lookup in lookups:
                lookup.release()


def _shown_by(module: TieredModule) -> Tensor:
    device = torch.device(module.engine.device_name)
    return torch.zeros(
        2, dtype=torch.float32, device="cpu" if device.type == "meta" else device
    ).requires_grad_()


def _copied(gradients: Gradients) -> Gradients:
    """Return copies of tensors, since users and wire buffers may change autograd's."""
    if isinstance(gradients, SequenceGradients):
        return SequenceGradients([_in_own_pages(grad) for grad in gradients.grads])
    assert isinstance(gradients, PooledGradients)
    weights, argmaxes = (
        [None if one is None else _in_own_pages(one) for one in tensors]
        for tensors in (gradients.weights, gradients.argmaxes)
    )
    return PooledGradients(_in_own_pages(gradients.grad), weights, argmaxes)


def _in_own_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, outside malloc's heap if it is large: there, between the temporaries of the
    passes to come, it would keep the pages of these temporaries."""
    if not tensor.is_cpu:
        return tensor.clone(memory_format=torch.contiguous_format)
    pages = torch.from_numpy(_core.rows_array(1, tensor.nbytes))
    return pages.view(-1).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _padding(module: TieredModule) -> int:
    return getattr(module, "_padding", NO_PADDING)


def _factor(kept: _Kept) -> float:
    """Return the factor by which the shown gradient was multiplied since :meth:`Accumulation.parameters`.

    A gradient of 0 hides its factor, which then changes nothing; a NaN gradient was scaled if it was written
    to. Raises ConfigError if it was changed otherwise, as by clip_grad_value_: that says nothing of a row."""
    shown = kept.shown.grad
    if not kept.norm or shown is None or (math.isnan(kept.norm) and shown._version == kept.version):
        return 1.0
    norm, witness = shown.tolist()
    if math.isfinite(norm) and abs(witness) > _SMALLEST and witness != norm * _WITNESS:
        raise ConfigError(
            "the gradient of a tensor of rows.parameters() is a norm, and was changed other than by a factor "
            "(by clip_grad_value_?): clip the gradients of rows by clip_grad_value of the tables' optimizer, "
            "or their norm by clip_grad_norm_"
        )
    return float(norm / kept.norm)


def _norm(module: TieredModule, passes: Sequence[Pass]) -> float:
    """Return the norm of the gradients of all rows together, on all ranks; the rows themselves are not
    read."""
    lookup, gradients = joined(passes, _padding(module))
    total = 0.0
    left_out = [*module.frozen_tables(), *module.tables_counted_elsewhere()]
    for index, part in enumerate(lookup.parts):
        count = len(part.batch.unique)
        squares, row = np.zeros(count, np.float32), np.zeros((1, part.group.layout.row_bytes), np.uint8)
        slots, csr = np.zeros(count, np.int32), trained_csr(part, left_out)
        args = update_args(part, slots, csr, _SUMS, squares=squares)
        rows = part.group.device.load(row, part.group.layout.weights)
        gradients.update(index, part, rows, args, None)
        total += float(squares.sum(dtype=np.float64))
    return math.sqrt(module.total_over_ranks(total))
