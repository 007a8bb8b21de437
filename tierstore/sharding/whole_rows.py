"""Puts the rows of a table's shards together, as an unsharded store holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.layout import RowLayout
from tierstore.cache.tiers.codec import Codec, decoded
from tierstore.initializers import from_dict, table_seed
from tierstore.keys import make_keys
from tierstore.optim import OptimizerSpec
from tierstore.optim import from_dict as optimizer_of
from tierstore.row_format import STATE_BYTES, WEIGHT_BYTES, WIDE, RowFormat
from tierstore.store.protocol import StoredTable

RowBytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Columns:
    """A range of a table's columns. ``spec``: of its shards in the stores of their ranks."""

    begin: int
    spec: StoredTable


class WholeRows:
    """The rows of one table, whose columns ``cuts`` cover once.

    ``spec`` describes the whole rows: as the shards hold them, but float32 where shards of some columns hold
    int8, since each has steps and offsets of its own.
    """

    def __init__(self, name: str, index: int, dim: int, cuts: Sequence[Columns]) -> None:
        self.cuts = cuts
        self.optimizer: OptimizerSpec = optimizer_of(cuts[0].spec.optimizer)
        self._name = name
        self._decodes = len(cuts) > 1 and cuts[0].spec.format.weights == "int8"
        form = WIDE if self._decodes else cuts[0].spec.format
        self.spec: StoredTable = replace(
            cuts[0].spec,
            name=name,
            index=index,
            embedding_dim=dim,
            row_bytes=form.row_bytes(dim, self.optimizer.state_floats(dim)),
            weight_dtype=form.weights,
            state_dtype=form.state,
        )

    def joined(self, parts: Sequence[RowBytes]) -> RowBytes:
        """Return whole rows, uint8 (n, row_bytes), of those of each range of columns, (n, its row_bytes)."""
        if len(self.cuts) == 1:
            return parts[0]
        form, dim = self.spec.format, self.spec.embedding_dim
        rows = np.zeros((len(parts[0]), self.spec.row_bytes), np.uint8)
        weights, state = self._views(rows, form, dim)
        places = self.optimizer.state_columns(dim)
        for cut, part in zip(self.cuts, parts, strict=True):
            width = cut.spec.embedding_dim
            plain = self._plain(cut.spec, part) if self._decodes else np.ascontiguousarray(part)
            own_weights, own_state = self._views(plain, form, width)
            weights[:, cut.begin : cut.begin + width] = own_weights
            for name, own in self.optimizer.state_columns(width).items():
                begin = places[name].start - dim
                if name not in self.optimizer.per_row:
                    begin += cut.begin
                elif cut.begin:
                    continue  # state of whole rows is that of the first columns
                state[:, begin : begin + own.stop - own.start] = own_state[
                    :, own.start - width : own.stop - width
                ]
        return rows

    def _views(self, rows: RowBytes, form: RowFormat, dim: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Return views of the weights and the state in ``rows``, an element each."""
        weights, state = form.parts(dim, rows.shape[1])
        kinds = f"u{WEIGHT_BYTES[form.weights]}", f"u{STATE_BYTES[form.state]}"
        found = [
            rows[:, part.begin : part.begin + part.bytes].view(kind)
            for part, kind in zip((weights, state), kinds, strict=True)
        ]
        return found[0], found[1]

    def _plain(self, spec: StoredTable, rows: RowBytes) -> RowBytes:
        floats = self.optimizer.state_floats(spec.embedding_dim)
        return decoded(spec.format, spec.embedding_dim, floats, np.ascontiguousarray(rows))

    def floats(self, rows: RowBytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return weights (n, dim) and state (n, floats) of whole rows."""
        dim, values = self.spec.embedding_dim, self._plain(self.spec, rows).view(np.float32)
        return values[:, :dim], values[:, dim : dim + self.optimizer.state_floats(dim)]

    def initial(self, cut: Columns, ids: NDArray[np.int64]) -> RowBytes:
        """Return the rows of ``ids`` (n,) in a range of columns as they are before any update."""
        spec = cut.spec
        dim, form = spec.embedding_dim, spec.format
        floats = self.optimizer.state_floats(dim)
        codec = None if form.is_wide else Codec(form, dim, floats)
        layout = RowLayout.of(
            dim,
            floats,
            self.optimizer.initial_state,
            [from_dict(spec.init)],
            [table_seed(spec.seed, self._name)],
            [cut.begin],
            codec,
            zeros=int(self.optimizer.decays_all),
        )
        wide = _core.rows_array(len(ids), layout.row_bytes)
        keys = make_keys(0, ids)
        layout.initialise(_core.HostRows.view(wide), None, keys)
        if codec is None:
            return wide
        rows = _core.rows_array(len(ids), codec.row_bytes)
        codec.encode(_core.HostRows.view(wide), keys, rows)
        return rows
