"""Shows progress while training runs: one live line on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

LIVE_INTERVAL = 0.5
"""Seconds between refreshes of the live line."""
LOG_INTERVAL = 5.0
"""Seconds between lines where there is no terminal."""


@dataclass(frozen=True)
class Progress:
    """The state of a training run. Rates are of the whole run so far, ``loss`` is of recent batches."""

    batches: int
    batches_total: int | None
    examples: int
    seconds: float
    stall_seconds: float
    loss: float
    auc: float
    hit_rate: Mapping[str, float] = field(default_factory=dict)
    """Hits per access by tier."""

    @property
    def examples_per_s(self) -> float:
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def stall(self) -> float:
        """Return the share of the time in which training waited for rows."""
        return self.stall_seconds / self.seconds if self.seconds else 0.0

    @property
    def done(self) -> float | None:
        """Return the share of the batches done; None when the number of batches is not known."""
        return self.batches / self.batches_total if self.batches_total else None

    def text(self, width: int | None = None) -> str:
        """Write one line: ``42% batch 1,234/2,950 · 210,000 examples/s · loss 0.4321 · AUC 0.7012 ...``.

        Where it has more than ``width`` columns it becomes shorter: by units, then without AUC and loss, then
        without the number of all batches. Hits and stall always stay.
        """
        parts = self._parts()
        if width is None or len(_line(parts)) <= width:
            return _line(parts)
        parts = self._parts(short=True)
        for dropped in ("AUC", "loss", "rate"):
            if len(_line(parts)) <= width:
                return _line(parts)
            del parts[dropped]
        return _line({**parts, "batch": f"{self.batches:,}"} if len(_line(parts)) > width else parts)

    def _parts(self, short: bool = False) -> dict[str, str]:
        done = "" if self.done is None else f"{self.done:4.0%} "
        total = "" if self.batches_total is None else f"/{self.batches_total:,}"
        speed, batch = f"{self.examples_per_s:,.0f} examples/s", "batch "
        if short:
            batch = ""
            speed = f"{self.examples_per_s / 1e3:,.3g}k/s" if self.examples_per_s >= 1e3 else speed
        parts = dict(
            batch=f"{done}{batch}{self.batches:,}{total}",
            rate=speed,
            loss=f"loss {self.loss:.4f}",
            AUC=f"AUC {self.auc:.4f}",
        )
        if self.hit_rate:
            rates = (f"{tier} {rate:.1%}" for tier, rate in self.hit_rate.items())
            parts["hits"] = "hits " + " ".join(rates)
        parts["stall"] = f"stall {self.stall:.0%}"
        return parts


def _line(parts: Mapping[str, str]) -> str:
    return " · ".join(parts.values())


class Display:
    """Shows :class:`Progress`; a context manager, which leaves the terminal in order however its body ends.

    ``due()`` is cheap: ask it every batch, and collect a ``Progress`` only when it says so. ``quiet``: it
    shows nothing.
    """

    def __init__(self, title: str, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._title = title
        self._quiet = quiet
        self.reader_gone = False
        """Whether nobody reads what is shown (``| head``); nothing is shown from then on."""
        self._stream = stream if stream is not None else sys.stderr
        self._live: Any = None
        self._interval = LIVE_INTERVAL if self._stream.isatty() else LOG_INTERVAL
        self._shown_at = 0.0
        self._last: str | None = None

    def __enter__(self) -> Display:
        if self._stream.isatty() and not self._quiet:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream, highlight=False), auto_refresh=False)
            self._live.start()
        self._shown_at = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def due(self) -> bool:
        return not self._quiet and time.perf_counter() - self._shown_at >= self._interval

    def show(self, progress: Progress) -> None:
        width = None if self._live is None else self._live.console.width - len(self._title) - 2
        line = f"{self._title}: {progress.text(width)}"
        self._shown_at = time.perf_counter()
        if line == self._last or self._quiet:
            return
        self._last = line
        if self._live is None:
            try:
                print(line, file=self._stream, flush=True)
            except BrokenPipeError:
                self.reader_gone = self._quiet = True
        else:
            from rich.text import Text

            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
