"""Tables without rows under a prefetch: what runs in place of a model where tiers are simulated.

Their lookups are a training's, and are planned by the engine's own code; forward marks the rows as updated
and releases them. With a plan every rank is a thread, and ids go from rank to rank in this process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tierstore.cache.keys_only import KeysEngine
from tierstore.errors import RankError
from tierstore.modules.base import TieredModule
from tierstore.modules.features import PooledFeatures
from tierstore.modules.inputs import Bags, FeatureLookup, pooled_lookup
from tierstore.modules.parts import Lookup
from tierstore.optim import OptimizerSpec
from tierstore.sharding.input_exchange import check_range
from tierstore.sharding.routing import Request, Routing
from tierstore.sparse import KeyedJaggedTensor
from tierstore.threads import Thread


class Lookups(Protocol):
    """Makes the lookup of a batch."""

    def make(self, features: Any) -> Lookup: ...


class SimulatedTables(TieredModule):
    """The tables of ``engine``, whose lookups ``lookups`` makes."""

    def __init__(
        self, engine: KeysEngine, optimizer: OptimizerSpec, lookups: Lookups, names: Sequence[str]
    ) -> None:
        super().__init__(engine, range(len(engine.tables)), optimizer)
        self._lookups, self._features = lookups, list(names)

    def lookup_inputs(self, features: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        return features.values(), features.lengths()

    def make_lookup(self, features: KeyedJaggedTensor) -> Lookup:
        return self._lookups.make(features)

    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[KeyedJaggedTensor]:
        return (KeyedJaggedTensor(list(keys or []), ids, lengths=lengths, offsets=offsets),)

    def feature_names(self) -> list[str]:
        return self._features

    def forward(self, features: KeyedJaggedTensor) -> None:
        """Plan the lookup of ``features``, and end it as an update of all of its rows does."""
        lookup: Any = self.find_lookup(features)
        lookup.acquire()
        for part in lookup.parts:
            part.group.mark_updated(part.rows)
            part.rows.release()


class Ranks:
    """Where the threads of ``world_size`` ranks exchange the ids of a batch, and numbers."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._given: dict[tuple[str, int], dict[int, Any]] = {}
        self._taken: Counter[tuple[str, int]] = Counter()
        self._failure: BaseException | None = None

    def give(self, what: str, number: int, rank: int, value: Any) -> None:
        """Give the other ranks a ``value``, the rank's exchange ``number`` of its kind."""
        with self._changed:
            self._given.setdefault((what, number), {})[rank] = value
            self._changed.notify_all()

    def take(self, what: str, number: int) -> list[Any]:
        """Return what all ranks have given, by rank; wait for it. Raises RankError if a rank has failed."""
        key = what, number
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._given[key]) == self.world_size)
            if self._failure is not None:
                raise RankError(f"another rank has failed: {self._failure}")
            values = self._given[key]
            self._taken[key] += 1
            if self._taken[key] == self.world_size:
                del self._given[key], self._taken[key]
            return [values[rank] for rank in range(self.world_size)]

    def fail(self, error: BaseException) -> None:
        """Let every rank that waits, or will wait, raise RankError."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


@dataclass(frozen=True)
class Exchange:
    """The exchange of the ids of batch ``number``, which the rank has given."""

    number: int

    def send(self) -> None:
        """Do nothing: ids are given at once."""


class RankLookups:
    """Makes the lookups of one rank in its shards, for the batches of all ranks."""

    def __init__(self, features: PooledFeatures, routing: Routing, engine: KeysEngine, ranks: Ranks) -> None:
        self._features, self._routing, self._engine, self._ranks = features, routing, engine, ranks
        self._tables = [engine.table_index(request.table) for request in routing.own]
        self._batches = 0

    def begin(self, features: KeyedJaggedTensor) -> Exchange:
        """Give the ranks the ids of this rank's batch. Raises InputError for an id that no table has."""
        bags = self._features.ids_of(features, [feature.table for feature in self._features.all])
        check_range(bags, self._features.bounds)
        exchange = Exchange(self._batches)
        self._batches += 1
        self._ranks.give("ids", exchange.number, self._routing.rank, bags)
        return exchange

    def finish(self, exchange: Exchange) -> FeatureLookup:
        """Return the lookup of the rows that all ranks ask this rank for."""
        of_ranks = self._ranks.take("ids", exchange.number)
        asked = [
            _asked(bags[request.feature], request, table)
            for request, table in zip(self._routing.own, self._tables, strict=True)
            for rank, bags in enumerate(of_ranks)
        ]
        return pooled_lookup(self._engine, asked, ())

    def make(self, features: KeyedJaggedTensor) -> FeatureLookup:
        return self.finish(self.begin(features))


def _asked(bags: Bags, request: Request, table: int) -> Bags:
    """Return the part of a feature's ids that a request of some of the rows is for."""
    if request.rows is None:
        return replace(bags, table=table)
    first, end = request.rows
    ids = bags.ids.numpy()
    here = (ids >= first) & (ids < end)
    before = np.concatenate([[0], np.cumsum(here)])
    ends = np.concatenate([[0], np.cumsum(bags.lengths)])
    return replace(bags, table=table, ids=torch.from_numpy(ids[here]), lengths=np.diff(before[ends]))


class SimulatedRank(SimulatedTables):
    """The shards of one rank, which looks rows up together with the other ranks."""

    collective = True
    _lookups: RankLookups

    def join(self, ranks: Ranks, rank: int) -> None:
        """Agree with ``ranks`` on numbers, as ``rank``."""
        self._ranks, self._rank, self._agreed = ranks, rank, 0

    def begin_exchange(self, features: KeyedJaggedTensor) -> Exchange:
        return self._lookups.begin(features)

    def finish_exchange(self, exchange: Exchange) -> Lookup:
        return self._lookups.finish(exchange)

    def announce_end(self, error: Exception | None) -> Exchange:
        return Exchange(-1)

    def min_over_ranks(self, value: int) -> int:
        self._ranks.give("number", self._agreed, self._rank, value)
        self._agreed += 1
        return int(min(self._ranks.take("number", self._agreed - 1)))


def run_ranks(count: int, work: Callable[[int], None], ranks: Ranks) -> None:
    """Call ``work(rank)`` in a thread per rank. Raises the first error of a rank that is its own.

    All threads have ended then, also where a signal interrupts the call: a thread that is left would abort
    the end of the process."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            ranks.fail(error)

    threads = [
        Thread(target=run, args=(rank,), name=f"simulated-rank-{rank}", daemon=True) for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        ranks.fail(error)
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
