"""Random operations on a module: what a training, and a user beside it, may do in any order.

A step draws from a generator of its own, so that leaving some steps out does not change the others.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tierstore
from tests.modules.machine_shapes import batch_of, given_of
from tests.modules.module_loops import Left, Loops
from tests.modules.module_machine import Kept
from tests.modules.module_sides import (
    STYLES,
    module_of,
    outputs_of,
    tiers_of,
    weights_of,
)
from tierstore import checkpoint
from tierstore.errors import ConfigError, GradientError, InputError


class Operations(Loops):
    """``skipped``: steps that are left out."""

    def __init__(self, seed: int, folder: Path, skipped: frozenset[int] = frozenset()) -> None:
        super().__init__(seed, folder)
        self.skipped = skipped
        random = Random(seed)
        self.by_checkpoint = random.random() < 0.4
        self.commits: dict[int, Kept] = {}
        self.handles: list[Any] = []
        self.step = 0

    def run(self, steps: int, first: int = 0) -> None:
        for self.step in range(first, first + steps):
            if self.step not in self.skipped:
                self.operate(Random(self.seed * 10_007 + self.step + 1))
        self.check()
        self.hand_over()
        self.end()

    def hand_over(self) -> None:
        """Do what the next machine of this seed needs."""

    def end(self) -> None:
        self.pending.clear()
        self.end_loops()
        self.subject.close(commit=False)
        self.twin.close()

    def operate(self, random: Random, inner: bool = False) -> None:
        """Do one operation; ``inner``: inside of a loop over prefetched batches."""
        chances = self.chances
        names = list(chances)
        weights = [0 if inner and name in self.outer else chances[name] for name in names]
        name = random.choices(names, weights)[0]
        self.note(f"{self.step}: {'  ' * inner}{name}")
        getattr(self, f"_{name}")(random)
        self.check_dense()
        if random.random() < 0.4:
            self.check()

    outer: ClassVar[tuple[str, ...]] = ("loop", "reopen")
    """Operations that are not drawn inside of loops."""

    @property
    def chances(self) -> dict[str, float]:
        """How often each operation is drawn."""
        return OPERATIONS

    # -- lookups ---------------------------------------------------------------------------------

    def _train(self, random: Random) -> None:
        self.train_on(random, self.batch(random), random.choice(STYLES))

    def _later(self, random: Random) -> None:
        """The backward pass of an earlier forward pass."""
        if self.pending:
            self.backward(self.pending.pop(random.randrange(len(self.pending))))

    def _evaluate(self, random: Random) -> None:
        how = random.choice(["eval", "no_grad", "inference"])
        contexts = {"eval": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        for module in self.sides:
            module.train(how != "eval")
        with contexts[how]():
            losses = self.forward(random, self.batch(random), random.choice(STYLES))
        if how == "eval":
            self.backward(losses)
        for module in self.sides:
            module.train()

    def _accumulate(self, random: Random) -> None:
        how = random.choice(["update", "update", "step", "drop", "fail"])
        self.note(f"      {how}")
        with ExitStack() as ends:
            if how == "fail":
                ends.enter_context(pytest.raises(Left))
            both = [ends.enter_context(tierstore.accumulate(module)) for module in self.sides]
            self.dense.kept = []
            for number in range(random.randint(1, 3)):
                self.train_on(random, self.batch(random), random.choice(STYLES))
                if how == "step" and number == 0:
                    for rows in both:
                        rows.step()
                    self.dense.update_by_kept()
                    self.dense.kept = []
            if how == "drop":
                for rows in both:
                    rows.zero_grad()
                self.dense.kept = []
            if how == "fail":
                self.dense.kept = None
                raise Left
        self.dense.update_by_kept()

    def _freeze(self, random: Random) -> None:
        frozen = self.to_freeze(random)
        self._require(frozen, False)
        self.dense.frozen = set(frozen)
        self.note(f"      {frozen}")
        for _ in range(random.randint(1, 2)):
            self.train_on(random, self.batch(random), random.choice(STYLES))
        self._require(frozen, True)
        self.dense.frozen = set()

    @property
    def trained(self) -> list[str]:
        return [name for name, spec in self.shape.specs.items() if spec is not None]

    @property
    def hookable(self) -> list[str]:
        """The tables that may have gradient hooks."""
        return self.trained

    def to_freeze(self, random: Random) -> list[str]:
        """The tables that are frozen together."""
        return random.choice(
            [self.trained, random.sample(self.trained, random.randint(1, len(self.trained)))]
        )

    def _require(self, tables: list[str], value: bool) -> None:
        for module in self.sides:
            if len(tables) == len(self.shape.tables):
                module.requires_grad_(value)
                continue
            for name in tables:
                self.view(module, name).requires_grad_(value)

    def view(self, module: Any, name: str) -> Any:
        return getattr(module, module.views_name)[name] if self.shape.keyed else module

    def _wrong(self, random: Random) -> None:
        """An id that no table has."""
        batch, rows = batch_of(random, self.shape, outside=True), self.shape.rows_of
        if self.shape.bounds != "fatal":
            return
        if any(not 0 <= id < rows[key] for key in rows for id in batch.flat(key)):
            for module in self.sides:
                with pytest.raises(InputError, match=r"out of range|outside"):
                    outputs_of(module, self.shape, given_of(batch, self.shape))

    # -- optimizers and hooks --------------------------------------------------------------------

    def _rate(self, random: Random) -> None:
        rates = dict.fromkeys(self.dense.lr, random.choice([0.02, 0.1, 0.2]))
        if self.shape.by_table:
            rates = {name: random.choice([0.02, 0.1, 0.2]) for name in rates}
        self.set_rates(rates)

    def set_rates(self, rates: dict[str, float]) -> None:
        self.dense.lr = dict(rates)
        for module in self.sides:
            for group in module.fused_optimizer.param_groups:
                group["lr"] = rates[group.get("tables", list(rates))[0]]

    def _hook(self, random: Random) -> None:
        if self.handles:
            self.remove_hooks()
            return
        if not (tables := self.hookable):
            return
        table = random.choice(tables)
        factor = random.choice([0.5, -1.0])

        def hook(ids: Tensor, gradients: Tensor) -> Tensor:
            return gradients * factor + (ids % 3).view(-1, 1) * 0.125

        own = table if self.shape.keyed else None
        self.handles = [module.register_gradient_hook(hook, own) for module in self.sides]
        self.dense.hooks[table] = hook

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.dense.hooks.clear()

    def _failing_hook(self, random: Random) -> None:
        """No row changes where a hook raises."""

        def hook(ids: Tensor, gradients: Tensor) -> None:
            raise Left

        table = random.choice(self.trained)
        handle = self.subject.register_gradient_hook(hook, table if self.shape.keyed else None)
        self.remove_hooks()
        loss = self.forward(random, self.batch(random), "plain")[0]
        try:
            loss.sides[0].backward()
            assert self.subject.fused_optimizer.num_updates == self.dense.updates + 1, "no update is counted"
            self.undo(random)
        except GradientError:
            pass
        handle.remove()
        if (weights := weights_of(loss.call.subject)) is not None:
            weights.grad = None

    def undo(self, random: Random) -> None:
        """Give the tiered side the rows that it had: its lookup had none of the table with the hook."""
        for name, (weight, state) in self.rows_of(self.twin).items():
            self.subject.load_rows(torch.arange(len(weight)), weight, state or None, name)
        self.subject.set_updates(self.dense.updates)

    # -- rows ------------------------------------------------------------------------------------

    def _load_rows(self, random: Random) -> None:
        table = random.choice(self.shape.tables)
        ids = torch.tensor(random.sample(range(table.rows), random.randint(1, min(12, table.rows))))
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        weight, state = torch.randn(len(ids), table.dim, generator=generator).to(self.shape.dtype), None
        own = self.dense.states[table.name]
        if random.random() < 0.3 and own and "last_update" not in own:
            state = {name: torch.rand(len(ids), *v.shape[1:], generator=generator) for name, v in own.items()}
        by_view = self.shape.keyed and state is None and random.random() < 0.5
        for module in self.sides:
            if by_view:
                with torch.no_grad():
                    self.view(module, table.name).weight[ids] = weight
            else:
                module.load_rows(ids, weight, state, table.name)
        self.dense.weights[table.name][ids] = weight.float()
        for name, value in (state or {}).items():
            own[name][ids] = value
        if "last_update" in own:
            own["last_update"][ids] = float(self.dense.updates)

    def _reset(self, random: Random) -> None:
        for module in self.sides:
            module.reset_parameters()
        self.dense.go_to(self.dense.initial)

    def _state_dict(self, random: Random) -> None:
        ours, theirs = self.subject.state_dict(), self.twin.state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            self.equal(value, theirs[name], name)
        if random.random() < 0.4:
            return
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        new = {name: torch.randn(v.shape, generator=generator).to(v.dtype) for name, v in ours.items()}
        for module in self.sides:
            module.load_state_dict(new)
        for table in self.shape.tables:
            own = [value for name, value in new.items() if f".{table.name}." in f".{name}"]
            self.dense.weights[table.name].copy_(own[0] if own else new["weight"])
            if "last_update" in (state := self.dense.states[table.name]):
                state["last_update"].fill_(float(self.dense.updates))

    def _optimizer_state(self, random: Random) -> None:
        """Exchange the optimizers' states of the two sides: they are the same."""
        ours, theirs = (module.fused_optimizer for module in self.sides)
        mine, other = ours.state_dict(), theirs.state_dict()
        ours.load_state_dict(other)
        theirs.load_state_dict(mine)

    def _touched(self, random: Random) -> None:
        for table in self.shape.tables:
            touched = torch.cat([torch.zeros(0, dtype=torch.int64), *self.subject.touched_ids(table.name)])
            ids = set(touched.tolist())
            assert len(ids) == len(touched), f"touched ids of {table.name} repeat: {touched}"
            new, old = self.dense.weights[table.name], self.dense.initial.weights[table.name]
            changed = set((new != old).any(1).nonzero().view(-1).tolist())
            assert changed <= ids <= set(range(table.rows)), f"touched ids of {table.name}"

    # -- commits ---------------------------------------------------------------------------------

    @property
    def saved(self) -> Path:
        return self.folder / "checkpoints"

    def _commit(self, random: Random) -> None:
        kept = Kept(self.rows_of(self.twin), self.dense.snapshot(), dict(self.dense.lr))
        number = len(self.log)
        if self.by_checkpoint:
            checkpoint.save(self.saved, self.subject, step=number, keep=3)
            self.commits = dict(list(self.commits.items())[-2:])
        else:
            number = self.subject.commit(tag=f"commit-{number}")
        self.commits[number] = kept

    def _go_to(self, random: Random) -> None:
        if not self.commits:
            return
        number = random.choice(list(self.commits))
        try:
            if self.by_checkpoint:
                assert checkpoint.restore(self.saved, self.subject, step=number) is not None
            else:
                self.subject.engine.go_to(number)
        except ConfigError as error:
            if "a prefetch is running" not in str(error) or not (self.looping or self.loops):
                raise
            return
        self._take(self.commits[number])
        self.pending.clear()

    def _take(self, kept: Kept) -> None:
        for name, (weight, state) in kept.rows.items():
            self.twin.load_rows(torch.arange(len(weight)), weight, state or None, name)
        self.twin.set_updates(kept.dense.updates)
        self.dense.go_to(kept.dense)
        if not self.by_checkpoint:  # an engine does not have what its modules have
            self.subject.take_updates()
            return
        self.set_rates(kept.rates)

    def _reopen(self, random: Random) -> None:
        self.end_loops()
        if self.by_checkpoint:
            self._commit(random)
        self.subject.close()
        self.pending.clear()
        config = tiers_of(random, self.shape, self.folder / "rows")
        self.config = tierstore.TierConfig(**{**vars(config), "engine": self.config.engine})
        self.note(f"{self.config}")
        self.subject = module_of(self.shape, self.config)
        numbers = {commit.id for commit in self.subject.engine.commits()}
        if not self.by_checkpoint:
            self.commits = {n: own for n, own in self.commits.items() if n in numbers}
        self.remove_hooks()
        self.set_rates(self.dense.lr)


OPERATIONS: dict[str, float] = {
    "train": 6,
    "later": 3,
    "evaluate": 3,
    "accumulate": 2,
    "freeze": 2,
    "wrong": 2,
    "rate": 1,
    "hook": 1,
    "failing_hook": 1,
    "load_rows": 3,
    "reset": 1,
    "state_dict": 2,
    "optimizer_state": 1,
    "touched": 2,
    "commit": 3,
    "go_to": 3,
    "reopen": 1,
    "loop": 8,
}
