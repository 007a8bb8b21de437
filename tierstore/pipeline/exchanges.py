"""What the ranks exchange about the batches of a prefetch: sizes and ids of sharded modules, and numbers that
must be the same on all ranks. Only the training thread calls this."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tierstore.errors import RankError, TierStoreError
from tierstore.modules.ahead import content_of
from tierstore.pipeline.learning import Call
from tierstore.pipeline.on_demand import WRONG_BATCH, say_why
from tierstore.pipeline.planned import Planned

logger = logging.getLogger("tierstore")


class RankExchanges:
    """The exchanges of sharded modules among ``calls``; without such modules there are no other ranks."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = [(number, call) for number, call in enumerate(calls) if call.module.collective]
        self.apart = False
        """Whether the ranks do not have the same batches any more."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, planned: Planned) -> None:
        """Begin to exchange the sizes of a batch."""
        for number, call in self._calls:
            module: Any = call.module
            args: tuple[Any, ...] | None = None
            try:
                args, kwargs = call.arguments(planned.batch)
                # before the ids are read, so that later changes are noticed
                planned.contents[number] = content_of(module.lookup_inputs(*args, **kwargs))
            except WRONG_BATCH as error:
                say_why(call, error, has_arguments=args is not None)
                args, kwargs = (None,), {}  # a wrong input: the other ranks learn of it, since they begin too
            planned.exchanges[number] = module.begin_exchange(*args, **kwargs)

    def begin_end(self, planned: Planned, error: Exception | None) -> None:
        """Begin to tell the other ranks that there are no more batches, or what the loader has raised."""
        for number, call in [] if self.apart else self._calls:
            module: Any = call.module
            planned.exchanges[number] = module.announce_end(error)

    def send(self, planned: Planned) -> None:
        """Send the ids of a batch whose sizes are exchanged. Exchanges that have failed are dropped."""
        for number, exchange in list(planned.exchanges.items()):
            try:
                exchange.send()
            except RankError as error:
                planned.error, self.apart = error, True
                del planned.exchanges[number]
            except TierStoreError as error:  # on all ranks, and the forward call will raise it
                logger.debug("no prefetch for a batch: %s", error)
                del planned.exchanges[number]

    def min_over_ranks(self, value: int) -> int:
        """Return the smallest ``value`` of any rank."""
        if not self._calls:
            return value
        module: Any = self._calls[0][1].module
        return int(module.min_over_ranks(value))

    def any_rank(self, condition: bool) -> bool:
        """Return whether ``condition`` holds on any rank."""
        return not self.min_over_ranks(int(not condition))
