"""What a simulation tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Simulation:
    """Counts of one run.

    A use misses if its row is not resident when its batch is planned: ``misses`` of unique rows of a batch
    (what must be fetched), ``access_misses`` of all accesses, repeats within the batch included.
    """

    policy: str
    capacity: int
    batches: int
    accesses: int
    uniques: int
    misses: int
    access_misses: int
    compulsory: int  # misses that are the first use of a row in the trace
    overflowed: int  # misses of batches that alone do not fit
    refused: int  # misses that admission gave no slot
    shrunk_plans: int  # plans that could not keep the full depth

    @property
    def miss_ratio(self) -> float:
        """Return the misses per access."""
        return self.access_misses / max(1, self.accesses)

    @property
    def unique_miss_ratio(self) -> float:
        """Return the misses per unique row of a batch."""
        return self.misses / max(1, self.uniques)

    @property
    def capacity_miss_ratio(self) -> float:
        """Return the misses per unique row without compulsory misses, since a row never written needs no
        read."""
        return (self.misses - self.compulsory) / max(1, self.uniques)
