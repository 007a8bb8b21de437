"""A module's input made ready for the tiers: what is looked up in each row layout, and how it is pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore._core import UpdateRounding
from tierstore.cache.group import TierGroup
from tierstore.cache.pinned_rows import Rows, TierRows
from tierstore.cache.row_access import find_rows

MODES = {"sum": 0, "mean": 1, "max": 2}
new_on_cpu = torch.empty(0, dtype=torch.float32, device="cpu").new_empty
"""Returns a float32 tensor of some sizes that is not initialised. Sizes one by one take half the time of a
tuple, and torch.empty with a device a third more."""


def new_floats(shape: tuple[int, ...], device: str) -> Tensor:
    """Return a float32 tensor that is not initialised."""
    if device == "cpu":
        return new_on_cpu(*shape)
    return torch.empty(shape, dtype=torch.float32, device=device)


@dataclass
class Part:
    """The share of one lookup that one group (row layout) serves.

    ``spans``: which positions of the module's ids are this part's, as (begin, end), in order. ``frozen``: the
    tables that were frozen in the forward pass; an update leaves their rows alone.
    """

    group: TierGroup
    batch: _core.Batch
    spans: list[tuple[int, int]]
    rows: Rows | None = None
    frozen: Sequence[int] = ()

    @property
    def device(self) -> str:
        """torch's name of the device that has the rows, where kernels find and leave tensors."""
        return self.group.device_name

    @property
    def nbytes(self) -> int:
        """Bytes that the part keeps once it is made, beside its deduplicated ids: the window counts those."""
        return 0

    @property
    def index_arrays(self) -> Sequence[NDArray[np.generic]]:
        """Return what calls of the device have for the part beside its ids."""
        return ()

    def weights_of(self, weights: Tensor) -> Tensor:
        """Return the per-sample weights, float32, of this part's positions."""
        pieces = [weights[begin:end] for begin, end in self.spans if begin < end] or [weights[:0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def put_weights(self, own: Tensor, out: Tensor) -> None:
        """Copy values of this part's positions to their places among the module's, ``out``."""
        done = 0
        for begin, end in self.spans:
            out[begin:end] = own[done : done + end - begin]
            done += end - begin

    def rounding(self, at: slice | NDArray[np.intp]) -> UpdateRounding | None:
        """Return how an update rounds the weights of these unique rows of the part."""
        layout = self.group.layout
        return None if layout.rounding is None else layout.rounding_of(self.batch.unique[at])


@dataclass
class PooledPart(Part):
    """Bags of positions, grouped by feature."""

    bags: _core.Bags = field(kw_only=True)

    @property
    def index_arrays(self) -> Sequence[NDArray[np.generic]]:
        return self.bags.arrays

    @property
    def nbytes(self) -> int:
        return self.bags.own_bytes


@dataclass
class SequencePart(Part):
    """One output row of ``group.layout.dim`` floats per position."""


@dataclass
class Lookup:
    """A module's input made ready for the tiers: checked and deduplicated. No row is fetched yet."""

    parts: Sequence[Part]
    out_shape: tuple[int, ...] = ()

    def new_output(self) -> Tensor:
        """Return a float32 tensor for a pooled output, not initialised, on the device of the tables."""
        return new_floats(self.out_shape, self.parts[0].device if self.parts else "cpu")

    def acquire(self) -> None:
        """Pin the rows of every part in the fast tier; wait for rows that were planned ahead."""
        try:
            for part in self.parts:
                if not (isinstance(part.rows, TierRows) and part.rows.wait()):
                    part.rows = part.group.lookup(part.batch)
        except BaseException:
            self.release()
            raise

    def read(self) -> None:
        """Find the rows of every part, or copy rows that may leave their places; change nothing.

        Rows that were pinned ahead are released."""
        self.release()
        for part in self.parts:
            part.rows = find_rows(part.group, part.batch)

    def release(self) -> None:
        for part in self.parts:
            if isinstance(part.rows, TierRows):
                part.rows.release()
