"""A sharded collection whose rows leave memory, one whose rows all stay, and the dense tables of all ranks.

Every rank has a machine of its own, draws the same operations, and looks up its own share of each batch. Its
dense side has the batches of all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.modules.module_machine import NEAR, Kept, Loss, scrambled
from tests.modules.module_operations import Operations
from tests.modules.module_sides import Call, module_of, outputs_of
from tests.sharding.machine_plans import collection_shape, cuts_columns, plan_of, rank_tiers
from tests.sharding.rank_batches import RankBatches, RankCall, joined, rank_batches
from tierstore import TierConfig
from tierstore.sharding import CommsConfig, DistributedModelParallel, shard

NAME = "sparse"


class ShardedMachine(Operations):
    """One rank's sides. ``whole`` models are what users commit and close: the subject and the twin
    themselves, or models around them."""

    whole: dict[str, Any]

    def open(self, random: Random) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shape = collection_shape(random)
        self.checked = random.random() < 0.4
        self.parallel = random.random() < 0.4
        self.note(f"seed {self.seed}, rank {self.rank} of {self.world}: {self.shape}")
        self.build(random)

    def build(self, random: Random) -> None:
        """Make both sides, by a new plan. The subject has the rows of the last commit."""
        exact = random.random() < 0.85
        precisions = [random.choice(["fp32"] if exact else ["fp32", "bf16", "fp16"]) for _ in range(2)]
        self.comms = CommsConfig(*precisions, dedup=random.random() < 0.3)
        name = NAME if self.parallel else ""
        self.plan = plan_of(random, self.shape, self.world, self.comms.dedup, name)
        tiers = rank_tiers(random, self.shape, self.plan, self.rank, self.folder / "rows")
        self.config = replace(tiers, check_gradients=self.checked)
        self.note(
            "\n".join(str((t.name, t.sharding_type.value, *map(_drawn, t.shards))) for t in self.plan.tables)
        )
        self.note(f"{self.comms} {'model' if self.parallel else 'collection'} {self.config}")
        memory = TierConfig(hbm="all", bounds_check=self.shape.bounds, check_gradients=self.checked)
        self.whole = {"subject": self.made(self.config), "twin": self.made(memory)}
        self.subject, self.twin = (
            model.sharded[NAME] if self.parallel else model for model in self.whole.values()
        )

    def made(self, config: TierConfig) -> Any:
        module = module_of(self.shape, TierConfig(hbm="all", bounds_check=self.shape.bounds))
        if not self.parallel:
            return shard(module, self.plan, config=config, comms=self.comms)
        model = nn.ModuleDict({NAME: module})
        return DistributedModelParallel(model, plan=self.plan, config=config, comms=self.comms)

    @property
    def model(self) -> Any:
        return self.whole["subject"]

    @property
    def hookable(self) -> list[str]:
        return [name for name in self.trained if not cuts_columns(self.plan, name)]

    def to_freeze(self, random: Random) -> list[str]:
        return self.trained

    def close(self, ours: Tensor, dense: Tensor, what: str) -> None:
        """Compare with the dense side, more loosely where vectors are rounded on the wire."""
        precisions = {self.comms.forward_precision, self.comms.backward_precision}
        if precisions == {"fp32"}:
            super().close(ours, dense, what)
            return
        assert ours.shape == dense.shape, f"{what}: {ours.shape}, dense {dense.shape}"
        near = torch.allclose(ours.float(), dense, **NEAR[torch.bfloat16])
        assert near, f"{what}: {ours}, dense {dense}"

    # -- lookups ---------------------------------------------------------------------------------

    def new_batch(self, random: Random, outside: bool) -> RankBatches:
        wrong = random.randrange(self.world)
        return rank_batches(random, self.shape, self.world, wrong if outside else None)

    def item(self, batch: RankBatches) -> Any:
        return batch.calls(0, self.shape, "plain", self.rank)[0].subject.keyed

    def forward(self, random: Random, batch: RankBatches, style: str) -> list[Loss]:
        style, seed = batch.style(style), random.randrange(1 << 30)
        if style == "changed" and not batch.all_have_ids:
            style = "plain"
        calls = batch.calls(seed, self.shape, style, self.rank)
        self.note(f"      {style} {batch}")
        return [self._called(random, call) for call in calls]

    def _called(self, random: Random, call: Call) -> Loss:
        assert isinstance(call, RankCall)
        mine = outputs_of(self.subject, self.shape, call.subject)
        other = outputs_of(self.twin, self.shape, call.twin)
        whole = joined(call.every, self.shape)
        own = None
        if whole.weights is not None:
            flat = [weight for key in whole.keys for bag in whole.weights[key] for weight in bag]
            own = torch.tensor(flat, dtype=torch.float32).requires_grad_()
        dense = self.dense.forward(whole, self.twin.training, own)
        places = [call.mine(name, self.shape) for name, _ in self.shape.features]
        for (name, _), a, b, c, at in zip(self.shape.features, mine, other, dense, places, strict=True):
            self.equal(a, b, f"output {name}")
            self.close(a, c[at], f"output {name}")
            assert a.requires_grad == b.requires_grad == c.requires_grad, f"gradient of {name}"
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        factors = [torch.randn(out.shape, generator=generator) for out in dense]
        own_factors = [factor[at] for factor, at in zip(factors, places, strict=True)]
        sides = [scrambled(outputs, own_factors) for outputs in (mine, other)]
        return Loss([*sides, scrambled(dense, factors) / self.world], own, call)

    def own_gradient(self, call: Call, gradient: Tensor) -> Tensor:
        """This rank's, of its own loss, which no number of ranks divides."""
        assert isinstance(call, RankCall)
        return call.own_weights(joined(call.every, self.shape), gradient) * self.world

    # -- state -----------------------------------------------------------------------------------

    def now(self) -> Kept:
        return Kept(self.rows_of(self.twin), self.dense.snapshot(), dict(self.dense.lr))

    def go_on_from(self, kept: Kept) -> None:
        """Let the twin and the dense side be at a commit, as the subject is."""
        for name, (weight, state) in kept.rows.items():
            self.twin.load_rows(torch.arange(len(weight)), weight, state or None, name)
        self.twin.set_updates(kept.dense.updates)
        self.dense.go_to(kept.dense)
        self.set_rates(kept.rates)

    def take_from_twin(self) -> None:
        """Let the dense side go on from the twin, after what it does not compute."""
        for name, (weight, state) in self.rows_of(self.twin).items():
            assert weight.isfinite().all(), f"rows of {name}"
            self.dense.weights[name].copy_(weight)
            for part, value in state.items():
                assert value.isfinite().all(), f"{part} of {name}"
                self.dense.states[name][part].copy_(value)
        self.dense.updates = self.twin.fused_optimizer.num_updates


def _drawn(piece: Any) -> tuple[int, ...]:
    return piece.rank, piece.row_start, piece.rows, piece.column_start, piece.columns
