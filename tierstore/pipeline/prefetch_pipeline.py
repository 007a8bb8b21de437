"""A training loop in the shape of torchrec's pipelines, over :func:`tierstore.prefetch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tierstore.pipeline.copies import copies_to
from tierstore.pipeline.prefetch import Inputs, prefetched


class PrefetchPipeline:
    """TorchRec-shaped training loop: ``progress(iterator)`` does one step and returns the model's output.

    ``model(batch)`` returns ``(loss, output)``; ``optimizer`` updates the dense parameters (rows are
    updated in the backward pass). Batches are moved to ``device`` with their own ``to``. To a GPU a stream of
    its own copies the next batch while one is in use, without waiting where its memory is pinned. Ids stay on
    the host, which plans lookups: keyed jagged tensors, and tensors of which each element is looked up, as is
    known from ``inputs`` or from the first batch. A class of batches that is no pytree of torch shows its
    tensors as attributes, or has ``record_stream``. ``StopIteration`` ends the epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device | str = "cpu",
        *,
        depth: int | str | None = None,
        window: int | str | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.model = model
        self.forward: Callable[[Any], tuple[torch.Tensor, Any]] = model
        """Called with each batch; returns ``(loss, output)``."""
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._options = depth, window, inputs
        self._copies = copies_to(self.device)
        self._source: Any = None
        self._batches: Iterator[Any] | None = None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Do one training step (in ``eval()`` mode: one forward pass) on the next batch of the iterator."""
        if self._batches is None or dataloader_iter is not self._source:
            self.close()
            self._source = dataloader_iter
            batches = self.batches_of(dataloader_iter)
            self._batches = prefetched(batches, self.model, *self._options, self._copies)
        try:
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        return self.step(batch) if self.model.training else self.evaluate(batch)

    def batches_of(self, dataloader_iter: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of the iterator that are trained: on the device, unless it is a GPU, to which
        they are copied when they are used."""
        if self.device.type == "cuda":
            return dataloader_iter
        return (batch.to(self.device) if hasattr(batch, "to") else batch for batch in dataloader_iter)

    def evaluate(self, batch: Any) -> Any:
        """Do a forward pass without gradients and return the model's output."""
        with torch.no_grad():
            return self.forward(batch)[1]

    def step(self, batch: Any) -> Any:
        """Do a training step and return the model's output."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss, output = self.forward(batch)
        loss.sum().backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return output

    def close(self) -> None:
        """End the prefetch; the next :meth:`progress` starts anew."""
        batches, self._batches, self._source = self._batches, None, None
        close: Callable[[], None] | None = getattr(batches, "close", None)
        if close is not None:
            close()
