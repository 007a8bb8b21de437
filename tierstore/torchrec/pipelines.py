"""torchrec's training pipelines, over tierstore's prefetch: no tracing, and the same steps in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import train_pipelines

from tierstore.errors import ConfigError
from tierstore.pipeline.prefetch_pipeline import PrefetchPipeline

_IN_FLIGHT = 2
"""Batches that torchrec's pipeline has beside the one that computes."""


class TrainPipelineSparseDist(PrefetchPipeline, train_pipelines.TrainPipeline[Any, Any]):
    """``progress(iterator)`` makes one step and returns the model's output, as torchrec's pipeline does.

    The rows of the coming batches are fetched meanwhile, and ids of sharded tables exchanged, as far ahead as
    ``depth`` and ``window`` of the TierConfig say. The model need not be traceable. With
    ``execute_all_batches=False`` the last two batches of an iterator are not trained, as in torchrec.

    ``pipeline_postproc``, ``dmp_collection_sync_interval_batches``, ``enqueue_batch_after_forward``,
    ``enable_inplace_copy_batch``, ``free_features_storage_early``, ``clear_data_dist_inputs`` and
    ``async_inplace_copy`` (of torchrec 1.9) have no effect; they change no result. ``apply_jit`` and another
    ``context_type`` raise ConfigError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[train_pipelines.TrainPipelineContext] = train_pipelines.TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        async_inplace_copy: bool = False,
    ) -> None:
        if apply_jit:
            raise ConfigError(
                "apply_jit: lookups of tiers are not scripted; leave it out, or use torch.compile"
            )
        if context_type is not train_pipelines.TrainPipelineContext:
            raise ConfigError("context_type: batches have no context here; leave it out")
        PrefetchPipeline.__init__(self, model, optimizer, device)
        if custom_model_fwd is not None:
            self.forward = custom_model_fwd
        self._all_batches = execute_all_batches

    # Where scripts of torchrec look for them.
    @property
    def _model(self) -> nn.Module:
        return self.model

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizer

    @property
    def _device(self) -> torch.device:
        return self.device

    def batches_of(self, dataloader_iter: Iterator[Any]) -> Iterator[Any]:
        batches = super().batches_of(dataloader_iter)
        return batches if self._all_batches else _without_last(batches)

    def detach(self) -> nn.Module:
        """Return the model, which no pipeline changes; the next call of :meth:`progress` goes on."""
        return self.model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Train ``model`` from now on; None: the same model."""
        if model is not None and model is not self.model:
            self.close()
            self.model = self.forward = model

    def reset(self) -> None:
        """Forget the batches that were pulled; the next call of :meth:`progress` starts anew."""
        self.close()


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """TrainPipelineSparseDist with the arguments of torchrec's pipeline for cached tables: rows of tiers are
    fetched ahead in either."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None,
        **without_effect: object,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            custom_model_fwd=custom_model_fwd,
            **without_effect,  # type: ignore[arg-type]
        )


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """``progress(iterator)`` makes one forward pass without gradients and returns the model's output."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, apply_jit=apply_jit)

    def step(self, batch: Any) -> Any:
        return self.evaluate(batch)


def _without_last(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield all batches but the last two: those that torchrec's pipeline still has when its loader ends."""
    held: deque[Any] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > _IN_FLIGHT:
            yield held.popleft()
