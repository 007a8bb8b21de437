"""Waits for the other ranks, learns that a rank has stopped, and tells the other ranks that this rank has."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

from tierstore.errors import InputError, RankError

_LOOK_AGAIN = timedelta(seconds=1)
"""Seconds that a rank waits before it looks whether another rank has stopped."""
_STOPPED = "tierstore: a rank has stopped"
_WAITS = "tierstore: waits, rank "
_GO_ON = (
    "Nothing of this step, or of a commit under way, counts; start the job again, and it goes on from the "
    "last commit of all ranks (set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun to restart ranks by "
    "itself)"
)
_ORDERLY = (StopIteration, StopAsyncIteration, GeneratorExit)


SIZES = "the exchange of the sizes of a batch"
IDS = "the exchange of ids"
VECTORS = "the exchange of rows"
GRADIENTS = "the exchange of gradients"
AGREEMENTS = "a commit, close() or another call of all ranks"
Collective: TypeAlias = tuple[str, int]
"""The kind of a collective, and its number among those of its kind."""


@dataclass
class Progress:
    """How many collectives of each kind a rank has begun (``begun``), and which it waits for before it begins
    another: number ``number`` of ``kind``; 0: none."""

    begun: dict[str, int] = field(default_factory=dict)
    kind: str = ""
    number: int = 0

    def never_meets(self, other: Progress) -> bool:
        """Return whether both ranks wait, each for a collective that the other rank has not begun."""
        return self._waits_beyond(other) and other._waits_beyond(self)

    def _waits_beyond(self, other: Progress) -> bool:
        return self.number > other.begun.get(self.kind, 0)


class Peers:
    """A rank's view of the other ranks. ``group``: of all ranks, which publish messages in its store.
    ``abandon``: called when this rank has lost the other ranks.

    Collectives are exchanges, by which a step moves sizes and ids of a batch (``SIZES``, ``IDS``), rows
    (``VECTORS``) or gradients (``GRADIENTS``), or agreements, as of a commit.
    """

    def __init__(self, rank: int, group: Any, abandon: Callable[[], None] = lambda: None) -> None:
        self._rank, self._group, self._abandon = rank, group, abandon
        self.progress = Progress()
        self.handled: BaseException | None = None
        """The exception that all ranks were handling at the same point, so that it stops none of them."""
        self._thread = 0
        """The thread that begins collectives. Threads that read ahead may wait while it does not."""
        self.lost = ""
        """Why this rank and the other ranks are no longer at the same point; empty while all are."""

    def begin(self, kind: str) -> Collective:
        """Count a collective that this thread is about to begin; return it, to wait for it."""
        self._thread = threading.get_ident()
        begun = self.progress.begun
        begun[kind] = begun.get(kind, 0) + 1
        return kind, begun[kind]

    @contextmanager
    def reached(self, kind: str = "") -> Iterator[None]:
        """Raise RankError where torch says with a bare RuntimeError that a rank is gone or too late.

        ``kind``: of the collective, if this rank waits for one.

        Every collective is in it, and every later one raises RankError, too. A rank that leaves a collective
        for another reason, as an interrupt, is not at the same point as the other ranks either.
        """
        if self.lost:
            raise RankError(self.lost)
        try:
            yield
        except RankError as error:
            self._lose(str(error))
            raise
        except RuntimeError as error:
            gone = f"another rank of the job has died or does not answer ({error})"
            if kind:
                gone += (
                    f". Rank {self._rank} waited in {kind}: if the other ranks are alive, one of them waits "
                    "elsewhere, as in a barrier; make as many calls of sharded tables on every rank, "
                    "also in eval()"
                )
            self._lose(f"{self._stop_reason() or gone}. {_GO_ON}")
            raise RankError(self.lost) from error
        except BaseException as error:
            self.stop(error)
            raise

    def wait(self, work: Any, awaited: Collective) -> None:
        """Wait for a collective. Raises RankError if it fails, if any rank has stopped, or waits itself for a
        collective that this rank has not begun."""
        reported = False
        with self.reached(awaited[0]):
            while not _is_done(work):
                if reason := self._stop_reason():
                    raise RankError(f"{reason}. {_GO_ON}")
                if threading.get_ident() == self._thread:
                    reported = True
                    self._check_progress(awaited)
            if reported:
                self._publish(Progress())

    def follow(self, work: Any) -> None:
        """Let the current stream of the GPU wait for a collective there. The host does not wait: how long a
        rank may take is then for NCCL to say. Raises RankError if a rank is known to have stopped."""
        with self.reached():
            if reason := self._stop_reason():
                raise RankError(f"{reason}. {_GO_ON}")
            work.wait()

    def _lose(self, why: str) -> None:
        self.lost = why
        self._abandon()

    def _check_progress(self, awaited: Collective) -> None:
        """Tell the other ranks where this rank waits. Raises RankError if two ranks wait for one another."""
        here = Progress(self.progress.begun, *awaited)
        self._publish(here)
        for rank in range(self._group.size()):
            there = self._progress_of(rank)
            if here.never_meets(there):
                error = RankError(
                    f"rank {self._rank} waits in {here.kind}, and rank {rank} in {there.kind}: all ranks "
                    "must make as many steps, do the same with their batches in each, and call what all "
                    f"ranks call after the same ones. {_GO_ON}"
                )
                self.stop(error)
                raise error

    def _publish(self, progress: Progress) -> None:
        with suppress(Exception):
            self._group.get_group_store().set(f"{_WAITS}{self._rank}", json.dumps(asdict(progress)))

    def _progress_of(self, rank: int) -> Progress:
        with suppress(Exception):
            store, key = self._group.get_group_store(), f"{_WAITS}{rank}"
            if store.check([key]):  # keys are never deleted, so this does not wait
                return Progress(**json.loads(store.get(key)))
        return Progress()

    @property
    def stopped(self) -> bool:
        """Whether this rank has lost the other ranks, or any rank has stopped."""
        return bool(self.lost or self._stop_reason())

    def stop(self, error: BaseException) -> None:
        """Tell the other ranks, wherever they wait, that this rank has stopped because of ``error``."""
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        what = f"rank {self._rank} has stopped after {why}"[:1000]
        if not self.lost:
            self._lose(f"{what}. {_GO_ON}")
        with suppress(Exception):  # the host of the store may be gone; the other ranks notice that themselves
            self._group.get_group_store().compare_set(_STOPPED, "", what)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Tell the other ranks, which will wait for the work in the block, if it fails on this rank alone."""
        try:
            yield
            self.handled = sys.exc_info()[1]
        except (InputError, RankError):  # which all ranks raise
            raise
        except BaseException as error:
            self.stop(error)
            raise

    def _stop_reason(self) -> str:
        """Return the message of the first rank that stopped; empty if no rank has."""
        with suppress(Exception):
            store = self._group.get_group_store()
            if store.check([_STOPPED]):
                reason: str = store.get(_STOPPED).decode("utf-8", "replace")
                return reason
        return ""


def _is_done(work: Any) -> bool:
    try:
        work.wait(_LOOK_AGAIN)
    except RuntimeError:
        if work.is_completed():
            work.wait(_LOOK_AGAIN)  # raises, unless it was completed after the first wait
            return True
        return False
    return True


def in_flight(handled: BaseException | None = None) -> BaseException | None:
    """Return the error because of which the caller's ``finally`` or ``except`` runs; None without any, for
    ``handled`` and for what ends a loop or a program in good order."""
    error = sys.exc_info()[1]
    if error is handled or isinstance(error, _ORDERLY):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    return error
