"""Random operations on sharded collections, by all ranks together."""

from __future__ import annotations

import pickle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.modules.module_loops import Left
from tests.modules.module_operations import OPERATIONS
from tests.modules.module_sides import outputs_of, weights_of
from tests.sharding.rank_batches import RankBatches, RankCall
from tests.sharding.sharded_machine import ShardedMachine
from tierstore import checkpoint
from tierstore.errors import GradientError, InputError, RankError
from tierstore.sharding import sharded_state_dict


class ShardedOperations(ShardedMachine):
    """``last``: the state that a new subject opens with. ``bound``: whether the last commit has an extra, so
    that closing commits nothing."""

    outer = ("loop", "reopen", "fail")

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.last, self.bound, self.number = self.now(), False, 0
        self.saves = 0
        if self.handed_over.exists():  # by other ranks
            self.last, self.bound, self.number = pickle.loads(self.handed_over.read_bytes())
            self.restore()

    @property
    def handed_over(self) -> Path:
        return self.folder / "handed_over"

    def hand_over(self) -> None:
        """Commit for the next machine of this seed, which may be of other ranks."""
        self.end_loops()
        self._commit(Random(self.seed))
        if self.rank == 0:
            self.handed_over.write_bytes(pickle.dumps((self.last, self.bound, self.number)))

    @property
    def chances(self) -> dict[str, float]:
        return CHANCES

    def end(self) -> None:
        self.pending.clear()
        self.end_loops()
        self.subject.env.check_same({"updates": self.subject.fused_optimizer.num_updates})
        for model in self.whole.values():
            model.close(commit=False)

    def _wrong(self, random: Random) -> None:
        """An id of one rank that no table has: no rank looks anything up."""
        batch = self.new_batch(random, outside=True)
        if batch.wrong:
            self.refuse(batch)

    def refuse(self, batch: RankBatches) -> None:
        """Look a wrong batch up."""
        self.note(f"      wrong {batch}")
        call = batch.calls(0, self.shape, "plain", self.rank)[0]
        for module, given in zip(self.sides, (call.subject, call.twin), strict=True):
            with pytest.raises(InputError, match=r"out of range|outside"):
                outputs_of(module, self.shape, given)

    def loop_batch(self, random: Random) -> RankBatches:
        batch = self.new_batch(random, outside=random.random() < 0.1)
        return batch if batch.wrong else self.batch(random)

    def _body(self, random: Random, batch: RankBatches, style: str) -> None:
        if batch.wrong:
            self.refuse(batch)
        else:
            super()._body(random, batch, style)

    def _fail(self, random: Random) -> None:
        """One rank fails in a step, and all ranks begin anew at the last commit."""
        batch, failing, early = self.batch(random), random.randrange(self.world), random.random() < 0.5
        drawn, later = (Random(random.randrange(1 << 30)) for _ in range(2))  # a rank that fails draws less
        self.note(f"      rank {failing} {'before' if early else 'after'} the lookup of {batch}")
        self.remove_hooks()
        try:
            if self.rank == failing and early:
                raise Left
            losses = self.forward(drawn, batch, "plain")
            if self.rank == failing:
                raise Left
            losses[0].sides[0].backward()
            self.check()
            raise AssertionError("no rank has failed")
        except (Left, RankError):
            for model in self.whole.values():
                model.close()
        self.forget_gradients(batch)
        self.end_loops()
        self.pending.clear()
        dist.barrier()
        self.build(later)
        self.restore()

    def _not_a_number(self, random: Random) -> None:
        """A gradient of one column, on one rank: all ranks raise, and the rows that it is for stay."""
        batch, wrong = self.batch(random), random.randrange(self.world)
        feature, column = random.choice(self.shape.features), random.random()
        if not self.checked:
            return
        call = batch.calls(0, self.shape, "plain", self.rank)[0]
        assert isinstance(call, RankCall)
        self.note(f"      on rank {wrong}: {feature[0]} of {batch}")
        place = self.shape.features.index(feature)
        used = bool(call.every[wrong].flat(feature[0]))
        for module, given in zip(self.sides, (call.subject, call.twin), strict=True):
            outputs = outputs_of(module, self.shape, given)
            loss = torch.stack([out.sum() for out in outputs]).sum()
            if self.rank == wrong:
                loss = loss + (outputs[place][:, int(column * feature[1].dim)] * float("nan")).sum()
            if used:
                with pytest.raises(GradientError, match="NaN"):
                    loss.backward()
            else:
                loss.backward()
        self.forget_gradients(batch)
        self.take_from_twin()

    def forget_gradients(self, batch: RankBatches) -> None:
        """Drop what a backward pass that failed has left in the gradients of weights."""
        call = batch.calls(0, self.shape, "plain", self.rank)[0]
        for given in (call.subject, call.twin):
            if (weights := weights_of(given)) is not None:
                weights.grad = None

    # -- state -----------------------------------------------------------------------------------

    def _touched(self, random: Random) -> None:
        for table in self.shape.tables:
            mine = torch.cat([torch.zeros(0, dtype=torch.int64), *self.subject.touched_ids(table.name)])
            own = set(mine.tolist())
            assert len(own) == len(mine), f"touched ids of {table.name} repeat: {mine}"
            shards = [shard for shard in self.plan.table(table.name).shards if shard.rank == self.rank]
            held = {id for s in shards for id in range(s.row_start, s.row_start + s.rows)}
            assert own <= held, f"touched ids of {table.name} are of other ranks"
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, own)
            new, old = self.dense.weights[table.name], self.dense.initial.weights[table.name]
            changed = set((new != old).any(1).nonzero().view(-1).tolist())
            assert changed <= set().union(*every), f"touched ids of {table.name}"

    def _shards(self, random: Random) -> None:
        """Exchange the ranks' shards of rows, and of optimizer state, between the two sides."""
        ours, theirs = self.whole.values()
        mine, other = sharded_state_dict(ours), sharded_state_dict(theirs)
        ours.load_state_dict(other)
        theirs.load_state_dict(mine)
        for name in self.shape.specs:
            if "last_update" in (state := self.dense.states[name]):
                state["last_update"].fill_(float(self.dense.updates))
        if self.parallel:
            optimizers = ours.fused_optimizer, theirs.fused_optimizer
            mine, other = (
                sharded_state_dict(one) if random.random() < 0.5 else one.state_dict() for one in optimizers
            )
            optimizers[0].load_state_dict(other)
            optimizers[1].load_state_dict(mine)

    # -- commits ---------------------------------------------------------------------------------

    def _commit(self, random: Random) -> None:
        self.saves += 1  # the log is another on each rank
        step = self.saves
        if self.by_checkpoint:
            checkpoint.save(self.saved, self.model, step=step)
            self.bound = True
        else:
            self.bound = random.random() < 0.3
            number = self.model.commit({"step": step} if self.bound else None)
            assert number > self.number
            self.number = number
            assert self.model.committed_extra() == ({"step": step} if self.bound else {})
        self.last = self.now()

    def _reopen(self, random: Random) -> None:
        """Close, and open by another plan at what was committed."""
        self.end_loops()
        self.pending.clear()
        self.remove_hooks()
        keep = random.random() < 0.6
        if keep and (self.bound or self.by_checkpoint):
            self._commit(random)
        elif keep:
            self.last = self.now()
        self.note(f"      {'keep' if keep else 'go back'}")
        ours, theirs = self.whole.values()
        ours.close(commit=keep)
        theirs.close()
        self.build(random)
        self.restore()

    def restore(self) -> None:
        """Bring all sides to the last commit."""
        if self.by_checkpoint and self.bound:
            assert checkpoint.restore(self.saved, self.model) is not None
            for group in self.subject.fused_optimizer.param_groups:
                rate = self.last.rates[group.get("tables", list(self.last.rates))[0]]
                assert group["lr"] == rate, "learning rate"
        self.go_on_from(self.last)


CHANCES = {
    **{name: chance for name, chance in OPERATIONS.items() if name not in ("go_to", "failing_hook")},
    "not_a_number": 2,
    "shards": 1,
    "reopen": 3,
    "fail": 0.3,
}
