"""One training run of ``tierstore train``: prefetch, step, progress, evaluation."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tierstore
from tierstore.cache.stats import counters_of, go_on_counting
from tierstore.cli.progress import Progress
from tierstore.cli.ranks import ALONE, Ranks
from tierstore.cli.recording import Recording
from tierstore.data import Batch, Dataset
from tierstore.data.own_pages import OwnPagesWhileKept
from tierstore.data.parts import PartOfBatch
from tierstore.errors import InputError
from tierstore.models import AUC

RECENT_BATCHES = 100
"""Batches over which the reported training loss is averaged."""

# Distinct scores that the AUCs keep apart. The AUC of the running training needs four digits and must take no
# time; the AUC of a held-out part may take all memory that its promise allows.
_PROGRESS_SCORES = 1 << 14
_TEST_SCORES = 1 << 20


@dataclass(frozen=True)
class Schedule:
    """The batches that a run trains on. ``batch_size``: examples of a step on each rank."""

    batch_size: int
    epochs: int = 1
    steps: int | None = None
    """Batches to train on in all; None for all batches of ``epochs``."""
    ranks: Ranks = field(default=ALONE, compare=False)

    @property
    def global_batch(self) -> int:
        """Examples of a step on all ranks together."""
        return self.batch_size * self.ranks.size

    def batches(self, dataset: Dataset) -> int | None:
        """Return the batches of the whole run; None when the data set does not know its length."""
        if dataset.num_train is None:
            return self.steps
        known = -(-dataset.num_train // self.global_batch) * self.epochs
        return known if self.steps is None else min(known, self.steps)

    def draw(self, dataset: Dataset, start_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of the run from ``start_batch`` on, of all ranks together."""
        batches = dataset.train(self.global_batch, epochs=self.epochs, start_batch=start_batch)
        return batches if self.steps is None else islice(batches, max(self.steps - start_batch, 0))

    def held_out(self, dataset: Dataset) -> Iterator[Batch]:
        """Yield batches of the examples held out, of all ranks together."""
        return dataset.test(self.global_batch)


class Trainer:
    """Trains a model whose sparse part is one tiered collection, and counts batches, examples and hits.

    ``model(dense, sparse)`` returns logits, float32 (B,) or (B, 1). The backward pass updates the rows of
    ``embeddings``, and ``optimizer`` the dense parameters. Several ranks share the examples of every batch;
    loss and counts are of all, hits of this rank's rows.
    """

    def __init__(
        self, model: nn.Module, embeddings: Any, optimizer: torch.optim.Optimizer, schedule: Schedule
    ) -> None:
        self.model = model
        self.embeddings = embeddings
        self.optimizer = optimizer
        self.schedule = schedule
        self.ranks = schedule.ranks
        self.interrupted: Callable[[], bool] = lambda: False
        """Tells whether this rank is to stop after the present batch."""
        self.stopping = False
        """Whether any rank is to stop, as all ranks know it."""
        self.recording: Recording | None = None
        """Records every batch trained on."""
        self.batches = 0
        """Batches trained on, including those before the run was resumed."""
        self.batches_total: int | None = None
        """Batches of the whole run, once it has begun; None where the data set does not know its length."""
        self._examples = 0
        self._seconds = 0.0
        self._losses: deque[float] = deque(maxlen=RECENT_BATCHES)
        self._auc = AUC(exact=_PROGRESS_SCORES)
        self._auc_so_far = math.nan

    def train(self, dataset: Dataset, after_step: Callable[[], bool] = lambda: True) -> bool:
        """Train from batch ``self.batches`` on; ``after_step`` may end the run between two batches by False.

        Returns whether the run reached its end. Rows and dense parameters are as after whole batches.
        """
        self.model.train()
        self.batches_total = self.schedule.batches(dataset)
        loader = map(self.ranks.part_of, self.schedule.draw(dataset, self.batches))
        ahead: Any = tierstore.prefetch(OwnPagesWhileKept(loader), self.model)
        started = time.perf_counter() - self._seconds
        batches = iter(ahead)  # named, so that ``close`` ends it: Ctrl-C in a destructor is lost
        with closing(ahead):  # a loop that was left early still has batches in flight
            for batch in batches:
                with self.ranks.in_step():
                    self._step(batch)
                self._seconds = time.perf_counter() - started
                if not after_step() or self.stopping:
                    return False
        if not self.batches:
            raise InputError(f"data {dataset.name!r} has no examples to train on; look at its files")
        self._auc_so_far = self._auc.joined(self.ranks.gather(self._auc.state_dict())[1:])
        return True

    def _step(self, batch: Batch) -> None:
        logits = self.model(batch.dense, batch.sparse).reshape(-1)
        loss = mean_loss(logits, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        if self.recording is not None:
            self.recording.record(batch.sparse)
        self._auc.update(batch.labels, logits)  # on predictions made before the batch was trained on
        # Computed at fixed batches, not when shown: computing merges scores, and the clock must not matter.
        if math.isnan(self._auc_so_far) or self.batches % 32 == 31:
            self._auc_so_far = self._auc.value()
        total, asked = self.ranks.total(loss.item(), float(self.interrupted()))
        self.stopping = asked > 0
        self._losses.append(total / self.ranks.size)
        self._examples += batch.whole if isinstance(batch, PartOfBatch) else len(batch)
        self.batches += 1

    def evaluate(self, dataset: Dataset) -> tuple[float, float]:
        """Return the AUC of the held-out part and its share of positive labels; change no row."""
        auc, positives, examples = AUC(exact=_TEST_SCORES), 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in map(self.ranks.part_of, self.schedule.held_out(dataset)):
                scores = self.model(batch.dense, batch.sparse).reshape(-1)
                for labels, of_rank in self.ranks.gather((batch.labels.numpy(), scores.numpy())):
                    auc.update(labels, of_rank)
                    positives += float(labels.sum())
                    examples += len(labels)
        return auc.value(), positives / max(examples, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the sums behind the closing figures, without the model and the rows; on
        ranks, of each of them."""
        state = {
            "batches": self.batches,
            "examples": self._examples,
            "seconds": self._seconds,
            "losses": list(self._losses),
            "auc": self._auc,
            "auc_so_far": self._auc_so_far,
            "counters": counters_of(self.embeddings.engine.groups),
        }
        if not self.ranks.sharded:
            return state
        state |= {"auc": self._auc.state_dict(), "shards": self._shards()}
        return {"ranks": self.ranks.gather(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the position of another trainer, whose model and rows this trainer already has."""
        if "ranks" in state:
            state = state["ranks"][self.ranks.rank]
        self.batches, self._examples, self._seconds = state["batches"], state["examples"], state["seconds"]
        self._losses = deque(state["losses"], maxlen=RECENT_BATCHES)
        self._auc.load_state_dict(state["auc"])
        self._auc_so_far = state["auc_so_far"]
        if state.get("shards", self._shards()) == self._shards():  # counters of other shards mean nothing
            go_on_counting(self.embeddings.engine.groups, state["counters"])

    def _shards(self) -> list[str]:
        return [table.name for table in self.embeddings.engine.tables]

    def progress(self) -> Progress:
        stats = self.embeddings.stats()
        return Progress(
            batches=self.batches,
            batches_total=self.batches_total,
            examples=self._examples,
            seconds=self._seconds,
            stall_seconds=stats["stall_seconds"],
            loss=sum(self._losses) / max(len(self._losses), 1),
            auc=self._auc_so_far,
            hit_rate=_per_access(stats),
        )


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss of a batch; of a rank's part what makes the mean over ranks that of the batch."""
    if not isinstance(batch, PartOfBatch) or batch.weight == 1:
        return functional.binary_cross_entropy_with_logits(logits, batch.labels)
    total = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
    return total * (batch.weight / max(len(batch), 1))


def _per_access(stats: dict[str, Any]) -> dict[str, float]:
    rates = {name: tier["hit_rate"]["per_access"] for name, tier in stats["tiers"].items()}
    return {name: rate for name, rate in rates.items() if rate is not None}
