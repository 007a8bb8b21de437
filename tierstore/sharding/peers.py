"""The other ranks: waiting for them, hearing that one has stopped, and telling them that this one has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from tierstore.errors import InputError, RankError

logger = logging.getLogger("tierstore")

_LOOK_AGAIN = timedelta(seconds=1)
"""How long a rank waits before it looks whether one that it waits for has stopped."""
_STOPPED = "tierstore: a rank has stopped"
_GO_ON = (
    "Nothing of this step, or of a commit under way, counts; start the job again, and it goes on from the "
    "last commit of all ranks (set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun to restart ranks by "
    "itself)"
)
_ORDERLY = (StopIteration, StopAsyncIteration, GeneratorExit)


class Peers:
    """What a rank knows of the others. ``group``: of all of them, by whose store they tell one another."""

    def __init__(self, rank: int, group: Any) -> None:
        self._rank, self._group = rank, group
        self.lost = ""
        """Why this rank and the others are not at the same point any more; empty as long as they are."""

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Around every collective: torch says that a rank is gone, or too late, with a bare RuntimeError.

        Raises RankError then, and for ever after. A rank that leaves a collective for another reason, as an
        interrupt, is not at the same point as the others either.
        """
        if self.lost:
            raise RankError(self.lost)
        try:
            yield
        except RankError as error:
            self.lost = str(error)
            raise
        except RuntimeError as error:
            gone = f"another rank of the job has died or does not answer ({error})"
            self.lost = f"{self._said() or gone}. {_GO_ON}"
            raise RankError(self.lost) from error
        except BaseException as error:
            self.stop(error)
            raise

    def wait(self, work: Any) -> None:
        """Waits for a collective. Raises RankError if it fails, or if any rank says that it has stopped."""
        with self.reached():
            while not _is_done(work):
                if said := self._said():
                    raise RankError(f"{said}. {_GO_ON}")

    def stop(self, error: BaseException) -> None:
        """Tells the other ranks, wherever they wait, that this one has stopped because of ``error``."""
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        what = f"rank {self._rank} has stopped after {why}"[:1000]
        if not self.lost:
            self.lost = f"{what}. {_GO_ON}"
        with suppress(Exception):  # the host of the store may be gone, and then the ranks hear of that
            self._group.get_group_store().compare_set(_STOPPED, "", what)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around what the other ranks will wait for: they are told if it fails on this rank alone."""
        try:
            yield
        except (InputError, RankError):  # which all ranks raise
            raise
        except BaseException as error:
            self.stop(error)
            raise

    def _said(self) -> str:
        """What the first rank that stopped has said; empty if none has."""
        with suppress(Exception):
            store = self._group.get_group_store()
            if store.check([_STOPPED]):
                said: str = store.get(_STOPPED).decode("utf-8", "replace")
                return said
        return ""


def _is_done(work: Any) -> bool:
    try:
        work.wait(_LOOK_AGAIN)
    except RuntimeError:
        if work.is_completed():
            work.wait(_LOOK_AGAIN)  # raises, unless it was completed after the first one had given up
            return True
        return False
    return True


def in_flight(before: BaseException | None = None) -> BaseException | None:
    """The error because of which the caller's ``finally`` or ``except`` runs; None without any, for
    ``before`` and for what ends a loop or a program in good order."""
    error = sys.exc_info()[1]
    if error is before or isinstance(error, _ORDERLY):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    return error
