"""Looked-up vectors on their way back to the ranks that asked, and their gradients the other way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.sharding.env import ShardingEnv


@dataclass(frozen=True)
class Floats:
    """Sizes of one exchange, in floats. A rank's own part of the buffer that it computes is, one after
    another: for every rank the answers to it; for every rank the answers of replicas to it.

    ``answered``: answers to every rank; ``expected``: answers from every rank; ``replicas``: answers of this
    rank's replicas to every rank, of which those to the others are not sent (they have replicas), but whose
    gradients all replicas get.
    """

    answered: list[int]
    expected: list[int]
    replicas: list[int]


class OutputExchange(torch.autograd.Function):
    """``apply(local, env, floats)`` → (answers of all ranks, answers of the own replicas), both 1-D.

    Gradients are divided by the number of ranks, as those of the dense parameters under DDP are.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, env: ShardingEnv, floats: Floats) -> tuple[Tensor, Tensor]:
        ctx.env, ctx.floats = env, floats
        sharded = sum(floats.answered)
        received = torch.empty(sum(floats.expected))
        dist.all_to_all_single(received, local[:sharded], floats.expected, floats.answered, group=env.outputs)
        begin = sharded + sum(floats.replicas[: env.rank])
        return received, local[begin : begin + floats.replicas[env.rank]].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        env, floats = ctx.env, ctx.floats
        received, replica = (grad.contiguous() for grad in grads)
        sharded = sum(floats.answered)
        out = torch.empty(sharded + sum(floats.replicas))
        dist.all_to_all_single(out[:sharded], received, floats.answered, floats.expected, group=env.outputs)
        if len(out) > sharded:  # on all ranks or on none, for replicas answer every rank's batch
            own = [len(replica)] * env.world_size
            dist.all_to_all_single(
                out[sharded:], replica.repeat(env.world_size), floats.replicas, own, group=env.outputs
            )
        return out.div_(env.world_size), None, None


class WeightExchange(torch.autograd.Function):
    """``apply(weights, env, arriving, leaving)``: per-sample weights follow the ids that they belong to.

    ``leaving``, ``arriving``: how many go to and come from every rank. Gradients come back undivided.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, env: ShardingEnv, arriving: Sequence[int], leaving: Sequence[int]
    ) -> Tensor:
        ctx.env, ctx.arriving, ctx.leaving, ctx.kind = env, list(arriving), list(leaving), weights.dtype
        out = torch.empty(sum(arriving))
        dist.all_to_all_single(
            out, weights.to(torch.float32).contiguous(), ctx.arriving, ctx.leaving, group=env.outputs
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        out = torch.empty(sum(ctx.leaving))
        grad = grads[0].contiguous() * ctx.env.world_size  # undoes the division of the outputs' gradients
        dist.all_to_all_single(out, grad, ctx.leaving, ctx.arriving, group=ctx.env.outputs)
        return out.to(ctx.kind), None, None, None
