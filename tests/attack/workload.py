"""A training whose every step is a function of a seed and a number, so that any process can go on with it.

A *turn* is what happens between two updates: one or two batches, one backward pass, and sometimes rows that
are overwritten. Two modules of different row sizes share one engine, so prefetch has two groups of tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tierstore
from tierstore.optim import RowWiseAdagrad

ROWS = {"pairs": 900, "items": 34_000}
DIMS = {"pairs": 4, "items": 8}
HOT = 1_500
"""Ids of ``items`` that batches ask for; the others change in bulk alone."""
CHUNK_ROWS = 32_768
"""Rows of ``items`` that fill one chunk of a segment: the sizes of bulk changes lie around it."""
OPTIMIZER = RowWiseAdagrad(lr=0.05)


@dataclass(frozen=True)
class Batch:
    """Ids of both modules, the targets of their rows, and whether the turn's update follows."""

    turn: int
    last: bool
    reverse: bool
    items: Tensor
    pairs: Tensor
    targets: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Turn:
    """``bulk``: how many rows of ``items`` are overwritten after the update, 0 for none."""

    number: int
    batches: list[Batch]
    bulk: int


def turn_of(seed: int, number: int) -> Turn:
    """The ``number``-th turn of a training."""
    rng = np.random.default_rng([seed, number])
    count = int(rng.choice([1, 1, 1, 2]))
    reverse = bool(rng.integers(2)) and number % 2 == 1
    batches = []
    for index in range(count):
        items = torch.from_numpy((rng.zipf(1.3, 48) * 7919 + rng.integers(0, 40, 48)) % HOT)
        pairs = torch.from_numpy(rng.integers(0, ROWS["pairs"], (16, 3)))
        targets = (
            torch.from_numpy(rng.standard_normal((48, 8), np.float32)),
            torch.from_numpy(rng.standard_normal((16, 4), np.float32)),
        )
        batches.append(Batch(number, index == count - 1, reverse, items, pairs, targets))
    sizes = [0] * 45 + [1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, ROWS["items"]]
    return Turn(number, batches, int(rng.choice(sizes)))


def stream(seed: int, first: int, turns: int) -> Iterator[Batch]:
    """The batches of ``turns`` turns from ``first`` on."""
    for number in range(first, first + turns):
        yield from turn_of(seed, number).batches


class Model(nn.Module):
    """Two embedding modules, called in the order that a batch says."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.items = nn.Embedding.from_pretrained(_weights("items", generator), freeze=False)
        self.pairs = nn.EmbeddingBag.from_pretrained(_weights("pairs", generator), freeze=False, mode="sum")

    def forward(self, batch: Batch) -> Tensor:
        """The loss of one batch."""
        calls = [(self.items, batch.items), (self.pairs, batch.pairs)]
        if batch.reverse:
            outputs = [module(ids) for module, ids in reversed(calls)][::-1]
        else:
            outputs = [module(ids) for module, ids in calls]
        return torch.stack([((o - t) ** 2).sum() for o, t in zip(outputs, batch.targets, strict=True)]).sum()


def _weights(name: str, generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS[name], DIMS[name], generator=generator)


def open_model(config: tierstore.TierConfig) -> tuple[Model, Any]:
    """The model with its tables in tiers, and what :func:`tierstore.offload` returns."""
    model = Model()
    return model, tierstore.offload(model, config, OPTIMIZER)


def overwrite(tables: Any, turn: Turn) -> None:
    """Does the bulk change of a turn."""
    if turn.bulk:
        ids = torch.arange(turn.bulk)
        values = torch.randn(turn.bulk, DIMS["items"], generator=torch.Generator().manual_seed(turn.number))
        tables["items"].load_rows(ids, values)


def digest(tables: Any) -> str:
    """Of every bit of ``pairs`` and of the rows of ``items`` that batches ask for, with optimizer state."""
    return _digest(tables, "items", 0, HOT)[:32] + _digest(tables, "pairs", 0, ROWS["pairs"])[:32]


def cold_digest(tables: Any) -> str:
    """Of the rows that change in bulk alone."""
    return _digest(tables, "items", HOT, ROWS["items"])


def _digest(tables: Any, name: str, begin: int, end: int) -> str:
    ids = torch.arange(begin, end)
    result = hashlib.sha256(tables[name].rows(ids).numpy().tobytes())
    for value in tables[name].optimizer_rows(ids).values():
        result.update(value.numpy().tobytes())
    return result.hexdigest()


class Reference:
    """The same training with every row in memory, in one process without interruption."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.model, self.tables = open_model(tierstore.TierConfig(hbm="all"))
        self._digests = [digest(self.tables)]
        self._cold = [cold_digest(self.tables)]

    def digests(self, turn: int) -> tuple[str, str]:
        """What :func:`digest` and :func:`cold_digest` give after ``turn`` turns."""
        while len(self._digests) <= turn:
            self._step()
        return self._digests[turn], self._cold[turn]

    def _step(self) -> None:
        turn = turn_of(self.seed, len(self._digests) - 1)
        torch.stack([self.model(batch) for batch in turn.batches]).sum().backward()
        overwrite(self.tables, turn)
        self._digests.append(digest(self.tables))
        self._cold.append(cold_digest(self.tables) if turn.bulk else self._cold[-1])


def journal_of(folder: Path, life: int) -> Path:
    """Where a life says what it does."""
    return folder / f"life-{life}.journal"
