"""Sends looked-up vectors back to the ranks that asked, and their gradients the other way.

A rank computes the answers for all ranks in one buffer, *local*: answers to each of the other ranks, in their
order, then answers to itself; then the same again for tables that every rank has. Answers from the other
ranks arrive in *received*, in the order of the ranks. Answers are in the order of the requests, each (bags or
ids, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from tierstore.modules.autograd_context import derived_once
from tierstore.modules.gpu import brought
from tierstore.sharding.comms import CommsConfig, OutputMemory, WireMemory
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.peers import GRADIENTS
from tierstore.sharding.routing import Routing


@dataclass(frozen=True)
class Source:
    """One answer. ``start``: its first float in received (in local if ``here``).

    ``rows``: the vectors of the target that it has, where shards have different vectors; None: it is a
    summand of all. ``replica``: its gradients go to all ranks.
    """

    start: int
    here: bool
    replica: bool
    rows: Tensor | None


@dataclass(frozen=True)
class Target:
    """The place of a range of a feature's columns in the output: vector i at ``offset + i * stride``.

    ``divisor``: (count, 1), by which the sum of the sources is divided. ``features``: how many features the
    target has, each ``step`` floats after the one before it, and one after another in the sources.
    """

    offset: int
    stride: int
    count: int
    width: int
    sources: Sequence[Source]
    divisor: Tensor | None = None
    features: int = 1
    step: int = 0

    def of(self, output: Tensor) -> Tensor:
        # autograd's gradient may be a contiguous view that begins in the middle of another tensor
        at = output.storage_offset() + self.offset
        if self.features == 1:
            return output.as_strided((self.count, self.width), (self.stride, 1), at)
        return output.as_strided((self.features, self.count, self.width), (self.step, self.stride, 1), at)

    def found_in(self, buffer: Tensor, source: Source) -> Tensor:
        """Return the vectors of a source, of the shape of the target."""
        if source.rows is not None:
            floats = len(source.rows) * self.width
            return buffer[source.start : source.start + floats].view(-1, self.width)
        shape, floats = (self.count, self.width), self.features * self.count * self.width
        block = buffer[source.start : source.start + floats]
        return block.view(shape if self.features == 1 else (self.features, *shape))


def joined(targets: Sequence[Target]) -> list[Target]:
    """Return targets of the same places, fewer of them: features of one size that lie at equal distances in
    the output, and one after another in all of their sources, are one target."""
    runs: list[list[Target]] = []
    continued: dict[tuple[object, ...], list[Target]] = {}
    """Runs by the target that would be their next."""
    for target in targets:
        if target.divisor is not None or any(source.rows is not None for source in target.sources):
            runs.append([target])
            continue
        run = continued.pop(_place(target, 0), None)
        if run is None or not _goes_on(run, target):
            run = []
            runs.append(run)
        run.append(target)
        continued[_place(target, target.count * target.width)] = run
    return [
        run[0] if len(run) == 1 else replace(run[0], features=len(run), step=run[1].offset - run[0].offset)
        for run in runs
    ]


def _place(target: Target, after: int) -> tuple[object, ...]:
    """Return the size of a target, and the floats ``after`` the first ones of its sources."""
    starts = [(source.here, source.replica, source.start + after) for source in target.sources]
    return target.count, target.width, target.stride, tuple(starts)


def _goes_on(run: Sequence[Target], target: Target) -> bool:
    step = target.offset - run[-1].offset
    return step > 0 and (len(run) == 1 or step == run[1].offset - run[0].offset)


@dataclass(frozen=True)
class Sizes:
    """The number of floats per rank.

    ``answered``: to the other ranks, 0 to itself. ``expected``: from the other ranks. ``own``: of this rank's
    answers to itself. ``replicas``: of its replicas' answers to every rank.
    """

    answered: list[int]
    expected: list[int]
    own: int
    replicas: list[int]


@dataclass(frozen=True)
class OutputPlan:
    """The exchange of one batch. ``shape``: of the output."""

    env: ShardingEnv
    comms: CommsConfig
    wire: WireMemory
    outputs: OutputMemory
    sizes: Sizes
    targets: Sequence[Target]
    shape: tuple[int, ...]


def local_offsets(
    floats: NDArray[np.int64], replica: NDArray[np.bool_], env: ShardingEnv
) -> NDArray[np.int64]:
    """Return where in local each answer begins, by own request and rank; ``floats``: how long it is."""
    offsets = np.zeros_like(floats)
    at = 0
    for kind in (~replica, replica):
        for rank in env.others_first:
            lengths = floats[kind, rank]
            ends = at + np.cumsum(lengths)
            offsets[kind, rank] = ends - lengths
            at += int(lengths.sum())
    return offsets


def sizes_of(
    env: ShardingEnv,
    answered: NDArray[np.int64],
    replica: NDArray[np.bool_],
    routing: Routing,
    expected: Sequence[int],
) -> Sizes:
    """Return the sizes. ``answered``: floats by own request and rank; ``expected``: floats by answer."""
    to = answered[~replica].sum(axis=0).tolist()
    own, to[env.rank] = to[env.rank], 0
    coming = [0] * env.world_size
    for answer, floats in zip(routing.answers, expected, strict=True):
        if answer.rank != env.rank:
            coming[answer.rank] += floats
    return Sizes(to, coming, own, answered[replica].sum(axis=0).tolist())


def sources_of(
    env: ShardingEnv,
    routing: Routing,
    sizes: Sizes,
    expected: Sequence[int],
    rows: Sequence[Tensor | None],
) -> list[Source]:
    """Return where each of the routing's answers is. ``rows``: of each answer."""
    own_at = sum(sizes.answered)
    replica_at = own_at + sizes.own + sum(sizes.replicas) - sizes.replicas[env.rank]
    received_at = 0
    found = []
    for answer, floats, places in zip(routing.answers, expected, rows, strict=True):
        if answer.replica:
            found.append(Source(replica_at, True, True, places))
            replica_at += floats
        elif answer.rank == env.rank:
            found.append(Source(own_at, True, False, places))
            own_at += floats
        else:
            found.append(Source(received_at, False, False, places))
            received_at += floats
    return found


class OutputExchange(torch.autograd.Function):
    """``apply(local, plan)`` → output of ``plan.shape``.

    Gradients are divided by the number of ranks, as gradients of dense parameters are under DDP.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: OutputPlan) -> Tensor:
        ctx.plan = plan
        sizes, dtype = plan.sizes, plan.comms.forward_dtype
        sent = local.detach()
        if dtype is not torch.float32:
            rounded = plan.wire.take("rounded", len(sent), dtype).copy_(sent)
            sent = rounded
        received = plan.wire.take("received", sum(sizes.expected), dtype)
        work = plan.env.all_to_all(received, sent[: sum(sizes.answered)], sizes.expected, sizes.answered)
        output = plan.outputs.take(plan.shape)
        late = [target for target in plan.targets if not all(source.here for source in target.sources)]
        for target in plan.targets:
            if all(source.here for source in target.sources):
                _assemble(target, output, received, sent)
        work.wait()
        for target in late:
            _assemble(target, output, received, sent)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, sizes = ctx.plan, ctx.plan.sizes
        grad = grads[0].to(torch.float32).contiguous()
        dtype = plan.comms.backward_dtype
        answered = sum(sizes.answered)
        local = plan.wire.take("gradients", answered + sizes.own + sum(sizes.replicas))
        leaving = plan.wire.take("received", sum(sizes.expected), dtype)
        _spread(plan, grad, leaving, local, own=False)
        arriving = local[:answered] if dtype is torch.float32 else plan.wire.take("rounded", answered, dtype)
        work = plan.env.all_to_all(arriving, leaving, sizes.answered, sizes.expected, GRADIENTS)
        _spread(plan, grad, leaving, local, own=True)
        work.wait()
        if dtype is not torch.float32:
            local[:answered].copy_(arriving)
        _exchange_replicas(plan, local[answered + sizes.own :])
        return local, None


def _assemble(target: Target, output: Tensor, received: Tensor, local: Tensor) -> None:
    """Fill the target; partial sums are added in the order of the rows."""
    into = target.of(output)
    blocks = [target.found_in(local if source.here else received, source) for source in target.sources]
    if target.sources[0].rows is not None:
        for source, block in zip(target.sources, blocks, strict=True):
            assert source.rows is not None
            into.index_copy_(0, source.rows, block.to(torch.float32))
    elif len(blocks) == 1:
        into.copy_(blocks[0])
    else:
        torch.add(blocks[0].to(torch.float32), blocks[1], out=into)
        for block in blocks[2:]:
            into.add_(block)
    if target.divisor is not None:
        into.div_(target.divisor)


def _spread(plan: OutputPlan, grad: Tensor, leaving: Tensor, local: Tensor, own: bool) -> None:
    """Copy gradients of the output to where their rows are: into ``leaving``, or if ``own`` into
    ``local``."""
    dtype = plan.comms.backward_dtype
    for target in plan.targets:
        for source in target.sources:
            if source.here != own:
                continue
            part = target.of(grad)
            if source.rows is not None:
                part = part.index_select(0, source.rows)
            if target.divisor is not None:
                part = part / target.divisor
            into = target.found_in(local if own else leaving, source)
            if own and dtype is not torch.float32:
                into.copy_(part.div(plan.env.world_size).to(dtype))
            else:
                torch.div(part, plan.env.world_size, out=into)


def _exchange_replicas(plan: OutputPlan, replicas: Tensor) -> None:
    """Send every rank's gradients to all replicas. ``replicas``: gradients of the other ranks' batches, which
    are filled in, and gradients of this rank's batch."""
    env, sizes = plan.env, plan.sizes.replicas
    if env.world_size == 1 or not sum(sizes):  # on all ranks or on none: replicas answer every rank's batch
        return
    dtype = plan.comms.backward_dtype
    own = replicas[len(replicas) - sizes[env.rank] :].to(dtype)
    others = [0 if rank == env.rank else size for rank, size in enumerate(sizes)]
    given = [0 if rank == env.rank else len(own) for rank in range(env.world_size)]
    arrived = own.new_empty(sum(others))
    env.all_to_all(arrived, own.repeat(env.world_size - 1), others, given, GRADIENTS).wait()
    replicas[: sum(others)].copy_(arrived)


class WeightExchange(torch.autograd.Function):
    """``apply(weights, env, device, arriving, leaving)``: per-sample weights follow the ids that they belong
    to, and are on ``device`` then.

    ``leaving``, ``arriving``: how many go to and come from every rank. Gradients come back undivided.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        env: ShardingEnv,
        device: torch.device,
        arriving: Sequence[int],
        leaving: Sequence[int],
    ) -> Tensor:
        ctx.env, ctx.arriving, ctx.leaving = env, list(arriving), list(leaving)
        ctx.kind = weights.device, weights.dtype
        out = torch.empty(sum(arriving), dtype=torch.float32, device=device)
        given = brought(weights.detach().to(torch.float32).contiguous(), device)
        env.all_to_all(out, given, ctx.arriving, ctx.leaving).wait()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            grad = grads[0].contiguous() * ctx.env.world_size  # undo the division of the outputs' gradients
            out = grad.new_empty(sum(ctx.leaving))
            ctx.env.all_to_all(out, grad, ctx.leaving, ctx.arriving, GRADIENTS).wait()
            out = out.to(*ctx.kind)
        return derived_once(out, grads), None, None, None, None
