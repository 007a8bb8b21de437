"""The module of a random shape as plain dense tensors: torch's lookups, and optimizers by their formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tests.modules.machine_shapes import Batch, Shape, TableShape

Hook = Callable[[Tensor, Tensor], "Tensor | None"]


@dataclass
class Snapshot:
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    updates: int


class DenseModule:
    """Tables as ordinary tensors. Every backward pass of a lookup updates the lookup's rows, as the
    documentation says of tiered modules."""

    def __init__(
        self, shape: Shape, weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]]
    ) -> None:
        self.shape = shape
        self.initial = Snapshot(weights, states, 0)
        self.frozen: set[str] = set()
        self.hooks: dict[str, Hook] = {}
        self.lr = {name: spec.lr for name, spec in shape.specs.items() if spec is not None}
        self.kept: list[tuple[dict[str, set[int]], dict[str, Tensor]]] | None = None
        self.go_to(self.initial)

    def snapshot(self) -> Snapshot:
        weights = {name: weight.clone() for name, weight in self.weights.items()}
        states = {
            name: {part: value.clone() for part, value in own.items()} for name, own in self.states.items()
        }
        return Snapshot(weights, states, self.updates)

    def go_to(self, snapshot: Snapshot) -> None:
        self.weights = {name: weight.clone() for name, weight in snapshot.weights.items()}
        self.states = {
            name: {part: value.clone() for part, value in own.items()}
            for name, own in snapshot.states.items()
        }
        self.updates = snapshot.updates

    # -- lookups ---------------------------------------------------------------------------------

    def forward(self, batch: Batch, training: bool, weights: Tensor | None = None) -> list[Tensor]:
        """The output of each feature, in order. ``weights``: per sample, in the order of the ids."""
        trains = training and torch.is_grad_enabled() and any(map(self._trained, self.weights))
        flat = torch.cat([weight.reshape(-1) for weight in self.weights.values()]).detach()
        used = {table.name: self._used(batch, table) for table in self.shape.tables}
        if trains:
            flat.requires_grad_()
            frozen = set(self.frozen)
            flat.register_post_accumulate_grad_hook(lambda leaf: self._step(leaf, used, frozen))
        sizes = [weight.numel() for weight in self.weights.values()]
        cut = dict(zip(self.weights, flat.split(sizes), strict=True))
        tables = {name: cut[name].view(weight.shape) for name, weight in self.weights.items()}
        own: dict[str, Tensor | None] = dict.fromkeys(batch.keys)
        if weights is not None:
            counts = [len(batch.flat(key)) for key in batch.keys]
            own = dict(zip(batch.keys, weights.split(counts), strict=True))
        found = [
            self._output(batch, name, table, tables[table.name], own[name])
            for name, table in self.shape.features
        ]
        if batch.inverse is None:
            return found
        pairs = zip(found, self.shape.features, strict=True)
        return [out[torch.tensor(batch.inverse[name])] for out, (name, _) in pairs]

    def _trained(self, name: str) -> bool:
        return name not in self.frozen and self.shape.specs[name] is not None

    def _ids(self, batch: Batch, key: str, table: TableShape) -> list[int]:
        return [id if 0 <= id < table.rows else 0 for id in batch.flat(key)]

    def _used(self, batch: Batch, table: TableShape) -> set[int]:
        ids = {id for key in table.features for id in self._ids(batch, key, table)}
        return ids - {self.shape.padding}

    def _output(
        self, batch: Batch, key: str, table: TableShape, weight: Tensor, own: Tensor | None
    ) -> Tensor:
        ids = torch.tensor(self._ids(batch, key, table), dtype=torch.int64)
        if self.shape.kind in ("embedding", "rows"):
            return functional.embedding(ids, weight, self.shape.padding)
        counts = torch.tensor([len(bag) for bag in batch.bags[key]], dtype=torch.int64)
        starts = counts.cumsum(0) - counts
        if own is not None and table.pooling == "mean":  # which torch does not have
            sums = functional.embedding_bag(ids, weight, starts, mode="sum", per_sample_weights=own)
            return sums / counts.clamp(min=1)[:, None]
        return functional.embedding_bag(
            ids,
            weight,
            starts,
            mode=table.pooling,
            per_sample_weights=own,
            padding_idx=self.shape.padding,
        )

    # -- updates ---------------------------------------------------------------------------------

    def _step(self, leaf: Tensor, used: dict[str, set[int]], frozen: set[str]) -> None:
        """Update once, or keep the gradients. ``frozen``: tables that were frozen in the forward pass."""
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        sizes = [weight.numel() for weight in self.weights.values()]
        grads = {
            name: own.view(weight.shape)
            for (name, weight), own in zip(self.weights.items(), grad.split(sizes), strict=True)
        }
        for name in frozen | self.frozen:  # as in torch, also if they are trained again by an update
            used = used | {name: set()}
            grads[name] = torch.zeros_like(grads[name])
        if self.kept is not None:
            self.kept.append((used, grads))
        else:
            self._update(used, grads)

    def update_by_kept(self) -> None:
        """Update once, by all gradients that were kept, and keep no more."""
        kept, self.kept = self.kept, None
        if kept:
            used = {name: set().union(*(own[name] for own, _ in kept)) for name in self.weights}
            self._update(used, {name: sum(grads[name] for _, grads in kept) for name in self.weights})

    @torch.no_grad()
    def _update(self, used: dict[str, set[int]], grads: dict[str, Tensor]) -> None:
        self.updates += 1
        for name, ids in used.items():
            if ids and self._trained(name):
                rows = torch.tensor(sorted(ids))
                grad = grads[name][rows]
                hook = self.hooks.get(name)
                changed = None if hook is None else hook(rows, grad.clone())
                self._update_rows(name, rows, grad if changed is None else changed)

    def _update_rows(self, name: str, rows: Tensor, grad: Tensor) -> None:
        spec, weight, state = self.shape.specs[name], self.weights[name], self.states[name]
        own, lr = weight[rows], self.lr[name]
        if spec.clip_grad_norm is not None:
            norms = grad.norm(dim=1, keepdim=True)
            grad = grad * (spec.clip_grad_norm / (norms + 1e-6)).clamp(max=1)
        if spec.weight_decay_mode != "l2":
            missed = torch.zeros(len(rows))
            if spec.decays_all:
                missed = self.updates - 1 - state["last_update"][rows]
                state["last_update"][rows] = float(self.updates)
            own = own * ((1 - lr * spec.weight_decay) ** (missed + 1))[:, None]
        else:
            grad = grad + spec.weight_decay * own
        if spec.name == "momentum_sgd":
            buffer = state["momentum_buffer"]
            old = buffer[rows]
            buffer[rows] = spec.momentum * old + grad
            grad = buffer[rows]
        elif spec.name == "adagrad":
            state["sum"][rows] += grad.square()
            grad = grad / (state["sum"][rows].sqrt() + spec.eps)
        elif spec.name == "rowwise_adagrad":
            state["sum"][rows] += grad.square().mean(1)
            grad = grad / (state["sum"][rows].sqrt() + spec.eps)[:, None]
        elif spec.name in ("adam", "adamw", "partial_rowwise_adam"):
            (one, two), count = spec.betas, self.updates
            first, second = state["exp_avg"], state["exp_avg_sq"]
            squares = grad.square() if second.dim() == 2 else grad.square().mean(1)
            first[rows] = one * first[rows] + (1 - one) * grad
            second[rows] = two * second[rows] + (1 - two) * squares
            root = (second[rows] / (1 - two**count)).sqrt().view(len(rows), -1)
            grad = first[rows] / (1 - one**count) / (root + spec.eps)
        weight[rows] = (own - lr * grad).to(self.shape.dtype).float()
