"""A module whose rows leave memory, one whose rows all stay, and dense tables, which do the same.

Outputs, rows, optimizer state and gradients of weights of the two tiered sides have the same bits; the dense
side's are close.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.modules.dense_modules import DenseModule, Snapshot
from tests.modules.machine_shapes import batch_of, shape_of
from tests.modules.module_sides import Call, calls_of, module_of, outputs_of, tiers_of, weights_of
from tierstore import TierConfig

NEAR = {
    torch.float32: {"rtol": 2e-3, "atol": 2e-4},
    torch.float16: {"rtol": 2e-2, "atol": 1e-2},
    torch.bfloat16: {"rtol": 1e-1, "atol": 6e-2},
}
"""How close the dense side is after one operation, by the tables' dtype."""


@dataclass
class Loss:
    """The losses of one forward call on the three sides. ``own``: the dense side's weights."""

    sides: list[Tensor]
    own: Tensor | None
    call: Call


@dataclass
class Kept:
    """What a commit has: the rows and state of every table, the dense side, and learning rates."""

    rows: dict[str, tuple[Tensor, dict[str, Tensor]]]
    dense: Snapshot
    rates: dict[str, float]


class Machine:
    """The three sides, and what happens to them. ``log``: the operations so far."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.log: list[str] = []
        self.open(Random(seed))
        found = self.rows_of(self.twin)
        weights = {name: weight.float() for name, (weight, _) in found.items()}
        self.dense = DenseModule(self.shape, weights, {name: state for name, (_, state) in found.items()})
        self.batches: list[Any] = []
        self.pending: list[list[Loss]] = []
        """Losses whose backward pass comes later."""

    def open(self, random: Random) -> None:
        """Make the two tiered sides."""
        self.shape = shape_of(random)
        self.config = tiers_of(random, self.shape, self.folder / "rows")
        self.note(f"seed {self.seed}: {self.shape}")
        self.note(f"{self.config}")
        self.subject = module_of(self.shape, self.config)
        self.twin = module_of(self.shape, TierConfig(hbm="all", bounds_check=self.shape.bounds))

    def note(self, text: str) -> None:
        self.log.append(text)

    @property
    def sides(self) -> tuple[Any, Any]:
        return self.subject, self.twin

    # -- comparing -------------------------------------------------------------------------------

    def rows_of(self, module: Any) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
        found = {}
        for table in self.shape.tables:
            ids = torch.arange(table.rows)
            found[table.name] = module.rows(ids, table.name), module.optimizer_rows(ids, table.name)
        return found

    def check(self) -> None:
        """Compare all rows of the tiered sides."""
        theirs = self.rows_of(self.twin)
        for name, (weight, state) in self.rows_of(self.subject).items():
            self.equal(weight, theirs[name][0], f"rows of {name}")
            for part, value in state.items():
                self.equal(value, theirs[name][1][part], f"{part} of {name}")
        count = self.subject.fused_optimizer.num_updates
        assert count == self.dense.updates, f"{count} updates, {self.dense.updates} on the dense side"

    def check_dense(self) -> None:
        """Compare all rows of the dense side, and let it go on from those of a tiered side."""
        for name, (weight, state) in self.rows_of(self.twin).items():
            self.close(weight, self.dense.weights[name], f"rows of {name}")
            self.dense.weights[name].copy_(weight)
            for part, value in state.items():
                self.close(value, self.dense.states[name][part], f"{part} of {name}")
                self.dense.states[name][part].copy_(value)
        count = self.twin.fused_optimizer.num_updates
        assert count == self.dense.updates, f"{count} updates, {self.dense.updates} on the dense side"

    def equal(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        assert ours.dtype == theirs.dtype, what
        assert torch.equal(ours, theirs), f"{what}: {ours} is not {theirs}"

    def close(self, ours: Tensor, dense: Tensor, what: str) -> None:
        assert ours.shape == dense.shape, f"{what}: {ours.shape}, dense {dense.shape}"
        near = torch.allclose(ours.float(), dense, **NEAR[self.shape.dtype])
        assert near, f"{what}: {ours}, dense {dense}"

    # -- forward and backward --------------------------------------------------------------------

    def batch(self, random: Random) -> Any:
        """A new batch, or one of those before."""
        if self.batches and random.random() < 0.25:
            return random.choice(self.batches[-6:])
        outside = self.shape.bounds != "fatal" and random.random() < 0.3
        self.batches.append(self.new_batch(random, outside))
        return self.batches[-1]

    def new_batch(self, random: Random, outside: bool) -> Any:
        """A new batch; ``outside``: one of its ids is out of range."""
        return batch_of(random, self.shape, outside)

    def forward(self, random: Random, batch: Any, style: str) -> list[Loss]:
        """Look up on all sides, and compare."""
        calls = calls_of(random, batch, self.shape, style)
        self.note(f"      {style} {batch}")
        return [self._called(random, call) for call in calls]

    def _called(self, random: Random, call: Call) -> Loss:
        mine = outputs_of(self.subject, self.shape, call.subject)
        other = outputs_of(self.twin, self.shape, call.twin)
        weights = weights_of(call.twin)
        own = None if weights is None else weights.detach().reshape(-1).clone().requires_grad_()
        dense = self.dense.forward(call.batch, self.twin.training, own)
        for (name, _), a, b, c in zip(self.shape.features, mine, other, dense, strict=True):
            self.equal(a, b, f"output {name}")
            self.close(a, c.view(a.shape), f"output {name}")
            assert a.requires_grad == b.requires_grad == c.requires_grad, f"gradient of {name}"
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        factors = [torch.randn(out.shape, generator=generator) for out in mine]
        return Loss([scrambled(outputs, factors) for outputs in (mine, other, dense)], own, call)

    def backward(self, losses: list[Loss], times: int = 1, together: bool = True) -> None:
        """Pass back on all sides, and compare the gradients of weights."""
        for group in [losses] if together else [[one] for one in losses]:
            for side in range(3):
                total = torch.stack([one.sides[side] for one in group]).sum()
                for time in range(times if total.requires_grad else 0):
                    total.backward(retain_graph=time + 1 < times)
        for loss in losses:
            ours, theirs = weights_of(loss.call.subject), weights_of(loss.call.twin)
            alone = sum(weights_of(one.call.subject) is ours for one in losses) == 1
            if loss.own is not None and ours is not None and theirs is not None and alone:
                assert (ours.grad is None) == (loss.own.grad is None), "gradient of the weights"
                if ours.grad is not None and theirs.grad is not None and loss.own.grad is not None:
                    self.equal(ours.grad, theirs.grad, "gradient of the weights")
                    own = self.own_gradient(loss.call, loss.own.grad)
                    self.close(ours.grad.reshape(-1), own, "gradient of the weights")
        for loss in losses:
            for given in (loss.call.subject, loss.call.twin):
                if (weights := weights_of(given)) is not None:
                    weights.grad = None

    def own_gradient(self, call: Call, gradient: Tensor) -> Tensor:
        """Return what the gradient of a call's weights must be, by the dense side's."""
        return gradient

    def train_on(self, random: Random, batch: Any, style: str) -> None:
        losses = self.forward(random, batch, style)
        times, together = random.choice([1, 1, 1, 2]), random.random() < 0.6
        end = random.choice(["backward"] * 7 + ["drop", "later"])
        self.note(f"      {end} x{times} {'together' if together else 'one by one'}")
        if end == "backward":
            self.backward(losses, times, together)
        elif end == "later":
            self.pending.append(losses)


def scrambled(outputs: list[Tensor], factors: list[Tensor]) -> Tensor:
    """A loss that gives every float another gradient."""
    pairs = zip(outputs, factors, strict=True)
    return torch.stack([(out.float().sin() * factor).sum() for out, factor in pairs]).sum()
