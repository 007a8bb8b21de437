"""Microseconds of Python per forward call and per step of each module, beside an empty autograd function.

"forward" calls come one after another. A "step" also asks for the rows of every feature, goes back, and
releases the result, so its forward call finds less of its code in the processor's caches.
Every table is in memory, as small batches are, so that little is left but Python. The stages of ``stats()``
are native calls with few steps of Python around them. Their seconds are measured in a run of its own, and are
taken off. The stage "compute" of a step is of its backward pass, too, so a step's forward call is taken to
compute as long as a forward call that no step follows.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    optim,
    set_num_threads,
)
from tierstore.result_file import JsonFile

from . import Results, main

_ROWS = 1000
_BATCHES = 100
_STAGES = ("announce", "plan", "fetch", "move", "wait", "compute")

Case = tuple[nn.Module, list[tuple[Any, ...]], Callable[[Any], Sequence[Tensor]]]
"""A module, the arguments of its forward calls, and the tensors that a call's result is made of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--features", type=int, default=26, help="features of the collections (default: 26)")
    parser.add_argument("--batch-size", type=int, default=4, help="examples per batch (default: 4)")
    parser.add_argument("--dim", type=int, default=4, help="embedding dimension (default: 4)")
    parser.add_argument("--rounds", type=int, default=30, help="the best one counts (default: 30)")
    parser.add_argument("--eval", action="store_true", help="measure forward passes of frozen modules")
    parser.add_argument("--compiled", metavar="BACKEND", help="measure modules compiled by it (inductor)")


def run(args: argparse.Namespace, target: JsonFile | None) -> Results:
    torch.set_num_threads(1)
    set_num_threads(1)
    figures: dict[str, float] = {}
    for name, case in _cases(args):
        module, calls, tensors_of = case
        _Pass(module, calls, tensors_of, backward=True).measure(1)  # fills the tables
        module.train(not args.eval)
        called = module
        if args.compiled and not isinstance(module, _Empty):
            called = torch.compile(module, fullgraph=True, backend=args.compiled)
        one = _Pass(called, calls, tensors_of, backward=not args.eval)
        one.measure(2)  # compiles
        whole = one.measure(args.rounds)
        stages = dict.fromkeys(whole, 0.0)
        if not isinstance(module, _Empty):
            stages = one.stage_seconds(args.rounds, module)
        for key, seconds in whole.items():
            figures[f"{name} {key} us"] = 1e6 * seconds
            figures[f"{name} {key} python us"] = 1e6 * (seconds - stages[key])
        print(name, file=sys.stderr, flush=True)
    return figures, {"options": {key: str(value) for key, value in vars(args).items()}}


class _Pass:
    """Forward and backward passes over all batches."""

    def __init__(
        self,
        module: Any,
        calls: Sequence[tuple[Any, ...]],
        tensors_of: Callable[[Any], Sequence[Tensor]],
        backward: bool,
    ) -> None:
        self._module, self._calls, self._tensors_of, self._backward = module, calls, tensors_of, backward
        self._figures = {
            "forward": self._forward,
            "step's forward": self._forward_of_step,
            "step": self._step,
        }

    def measure(self, rounds: int) -> dict[str, float]:
        """Return seconds per pass: the mean over batches of a batch's best pass."""
        return {
            name: 1e-9 * float(np.array([self._round(one) for _ in range(rounds)]).min(axis=0).mean())
            for name, one in self._figures.items()
        }

    def stage_seconds(self, rounds: int, module: Any) -> Mapping[str, float]:
        """Return the seconds per pass that ``stats()`` of ``module`` has for its stages: the best round's."""
        found: dict[str, list[list[float]]] = {"forward": [], "step": []}
        for name, seconds in found.items():
            for _ in range(rounds):
                module.reset_stats()
                self._round(self._figures[name])
                stats = module.stats()
                seconds.append([stats[f"{stage}_seconds"] / len(self._calls) for stage in _STAGES])
        best = {name: min(map(sum, seconds)) for name, seconds in found.items()}
        # the last stage is "compute"
        lookup = min(sum(seconds[:-1]) for seconds in found["step"])
        return {**best, "step's forward": lookup + min(seconds[-1] for seconds in found["forward"])}

    def _round(self, one: Callable[[Any], int]) -> list[int]:
        gc.disable()
        with torch.set_grad_enabled(self._backward):
            found = [one(tuple(map(_fresh, call))) for call in self._calls]
        gc.enable()
        return found

    def _forward(self, call: Any) -> int:
        begin = time.perf_counter_ns()
        result = self._module(*call)  # noqa: F841  # released behind the clock
        return time.perf_counter_ns() - begin

    def _forward_of_step(self, call: Any) -> int:
        begin = time.perf_counter_ns()
        result = self._module(*call)
        passed = time.perf_counter_ns() - begin
        tensors = self._tensors_of(result)
        self._go_back(tensors, [torch.ones_like(one) for one in tensors])
        return passed

    def _step(self, call: Any) -> int:
        begin = time.perf_counter_ns()
        result = self._module(*call)
        tensors = self._tensors_of(result)
        passed = time.perf_counter_ns() - begin
        grads = [torch.ones_like(one) for one in tensors]
        begin = time.perf_counter_ns()
        self._go_back(tensors, grads)
        del result, tensors
        return passed + time.perf_counter_ns() - begin

    def _go_back(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if self._backward:
            torch.autograd.backward(tensors, grads)


def _fresh(given: Any) -> Any:
    """Return a batch as a loader makes it: figures per key that the last round has derived are gone."""
    if not isinstance(given, KeyedJaggedTensor):
        return given
    return KeyedJaggedTensor(given.keys(), given.values(), lengths=given.lengths())


class _Empty(nn.Module):
    """What a lookup costs that does nothing: a module, an autograd function, and an output of its size."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.anchor = shape, torch.zeros(0, requires_grad=True)

    def forward(self, given: object) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.empty(self.shape)
        return _Nothing.apply(self.anchor, self, self.shape)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: nn.Module, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(anchor)
        return torch.empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        assert ctx.saved_tensors
        return None, None, None


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    spec, size, dim = optim.SGD(lr=0.01), args.batch_size, args.dim
    random = torch.Generator().manual_seed(0)
    keys = [f"f{number}" for number in range(args.features)]

    def options() -> dict[str, Any]:
        return {"config": TierConfig(hbm="64MiB"), "optimizer": spec}

    def ids(count: int) -> Tensor:
        return torch.randint(0, _ROWS, (count,), generator=random)

    def keyed() -> KeyedJaggedTensor:
        lengths = torch.randint(0, 4, (len(keys) * size,), generator=random)
        return KeyedJaggedTensor(keys, ids(int(lengths.sum())), lengths=lengths)

    single = [(ids(2 * size), torch.arange(size) * 2) for _ in range(_BATCHES)]
    batches = [(keyed(),) for _ in range(_BATCHES)]
    tables = [(_ROWS, dim, f"t{number}") for number in range(args.features)]

    empty = _Empty((size, dim))
    yield "empty function", (empty, [call[:1] for call in single], lambda out: [out])
    bag = TieredEmbeddingBag(_ROWS, dim, mode="sum", **options())
    yield "EmbeddingBag", (bag, single, lambda out: [out])
    rows = TieredEmbedding(_ROWS, dim, **options())
    yield "Embedding", (rows, [call[:1] for call in single], lambda out: [out])
    pooled = [EmbeddingBagConfig(*one, feature_names=[key]) for one, key in zip(tables, keys, strict=True)]
    bags = EmbeddingBagCollection(pooled, **options())
    yield "EmbeddingBagCollection", (bags, batches, lambda out: [out.values()])
    single_rows = [EmbeddingConfig(*one, feature_names=[key]) for one, key in zip(tables, keys, strict=True)]
    each = EmbeddingCollection(single_rows, **options())
    yield "EmbeddingCollection", (each, batches, lambda out: [one.values() for one in out.values()])


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
