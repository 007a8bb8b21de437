"""The exchange of dense gradients in DistributedDataParallel, whose waits end where a rank has stopped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tierstore.sharding.env import Pending, ShardingEnv


class DenseGradients:
    """Averages the gradients of ``ddp`` over the ranks in place of its own all-reduce, with the same bits.

    DDP waits for its all-reduce in native code, and no message of another rank ends that wait. So a
    communication hook begins each all-reduce, and waits for it at the end of the backward pass, before DDP
    does, as for any other collective of ours. The forward call after the first such pass is where all ranks
    take over rank 0's order of gradients: :meth:`meet_before_forward` comes before that call.
    """

    def __init__(self, ddp: DistributedDataParallel, env: ShardingEnv) -> None:
        # No name for ``ddp``: it keeps the hook where Python's collector does not see it.
        self._env, self._group = env, ddp.process_group
        self._share = 1.0 / env.world_size
        self._began: list[tuple[Pending, Future[Tensor], Tensor]] = []
        self._averaged = self._ordered = False
        if env.world_size > 1:
            ddp.register_comm_hook(None, lambda state, bucket: self._average(bucket.buffer()))

    def meet_before_forward(self, ddp: DistributedDataParallel) -> None:
        """Let the ranks meet if ``ddp`` is about to broadcast buffers, or, once, the order of gradients.

        Raises RankError if a rank has stopped."""
        if self._env.world_size == 1:
            return
        with self._env.peers.reached():  # else DDP says that its last backward pass has not ended
            pass
        orders = self._averaged and not self._ordered and torch.is_grad_enabled()
        if orders or ddp.will_sync_module_buffers():
            self._env.meet()
        self._ordered = self._ordered or orders

    def _average(self, gradients: Tensor) -> Future[Tensor]:
        """Begin to average a bucket of gradients, in place."""
        self._averaged = True
        gradients.mul_(self._share)  # as DDP does without a hook: a division would have other bits
        if gradients.device.type != "cpu":  # the GPU's stream waits, and the host goes on
            work = dist.all_reduce(gradients, group=self._group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        if not self._began:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        done: Future[Tensor] = Future()
        self._began.append((self._env.all_reduce(gradients, self._group), done, gradients))
        return done

    def _finish(self) -> None:
        """Wait for all buckets; DDP's own callback at the end of the backward pass was queued later."""
        began, self._began = self._began, []
        for pending, done, gradients in began:
            pending.wait()
            done.set_result(gradients)
