"""Which announced lookups reading ahead reads rows for, and how many rounds it should have made by now.

The *horizon* is the lookups from the one that is planned now to the last one whose rows are read when a round
comes by. The horizon grows until its rows fill the room, and moves on with every lookup that begins.
"""

from __future__ import annotations

from collections import deque

from tierstore.rounds import horizon_batches, round_batches

_FIRST_ROWS = 1 << 18  # rows of the first round, for which the first plan waits
_GROWTH = 2  # lookups by which the end moves per lookup that begins, at most
_MEMORY = 1 / 16  # weight of the newest lookup in the mean of what lookups lack


class Horizon:
    """The horizon of one group. Rounds are fractions, as ``_core.Sweep`` counts them."""

    def __init__(self) -> None:
        self.last_announced = self.last_begun = -1
        self.end = -1
        """The last lookup whose rows are read when the round comes by."""
        self.due = 0.0
        """Rounds that should be complete; 0 before the first lookup begins."""
        self.until = 0.0
        """Rounds after which the newest lookup's rows are here."""
        self._announced: deque[tuple[int, int]] = deque()  # coming lookups, and their numbers of rows
        self._entered: deque[tuple[int, float]] = deque()  # former ends, and the rounds from then on
        self._lookups = 0  # lookups that the horizon had when its end has moved last
        self._lacking = 0.0  # the mean number of rows that a lookup lacks

    def announce(self, seq: int, rows: int) -> None:
        """Learn that coming lookup ``seq`` is the first one to ask for ``rows`` rows."""
        self.last_announced = seq
        self._announced.append((seq, rows))

    def lookup_begun(self, seq: int, rounds: float, room: int, max_rows: int) -> bool:
        """Move on to lookup ``seq``, which is being planned. Return False where nothing is read ahead.

        ``rounds``: how many are complete. ``room``, ``max_rows``: rows that may be read now, and in all.
        """
        if not self.due and not self._announced:
            self.last_begun = seq
            return False
        if not self.due:
            self.begin(seq, rounds, room)
        steps, self.last_begun = seq - self.last_begun, seq
        while self._entered and self._entered[0][0] < seq:
            self._entered.popleft()
        self.until = self._entered[0][1] + 1 if self._entered else 0.0
        while self._announced and self._announced[0][0] <= seq:
            self._announced.popleft()
        lacking = max(self._lacking, 1.0)
        fitting = int(horizon_batches(max_rows, lacking))  # lookups for whose rows there is room
        self._extend(min(self.last_announced, seq + fitting, self.end + _GROWTH * steps), rounds)
        self.due = min(self.due + steps / round_batches(self._lookups, max_rows, lacking), rounds + 1)
        return True

    def begin(self, seq: int, rounds: float, room: int) -> None:
        """Begin the first round of a window, with the lookups from ``seq`` on whose rows find room."""
        self.last_begun = seq - 1
        self.due, room, end = 1.0, min(room, _FIRST_ROWS), seq
        for lookup, rows in self._announced:
            room -= rows
            if room < 0:
                break
            end = lookup
        if not self._lacking and self._announced:
            self._lacking = sum(rows for _, rows in self._announced) / len(self._announced)
        self._extend(end, rounds)

    def _extend(self, end: int, rounds: float) -> None:
        if end > self.end:
            self.end = end
            self._entered.append((end, rounds))
            # At the end of a window nothing enters any more, and the rounds stay as long as they are.
            self._lookups = self.end - self.last_begun

    def lookup_filled(self, rows: int) -> None:
        """Learn that the newest lookup has its rows, of which it lacked ``rows``."""
        self.until = 0.0
        self._lacking += (rows - self._lacking) * (_MEMORY if self._lacking else 1.0)

    def forget(self) -> None:
        """Forget the announced lookups: they will not come."""
        self.due = self.until = 0.0
        self._announced.clear()
        self._entered.clear()
        self.last_announced, self.end, self._lookups = self.last_begun, -1, 0
