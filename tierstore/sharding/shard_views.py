"""Weights and optimizer states of sharded tables as ShardedTensors, which torch.distributed.checkpoint saves
and loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from tierstore.errors import InputError
from tierstore.modules.left_out import STATE_DICT_LIMIT
from tierstore.modules.tables import TORCH_DTYPES, ThreadFlag, id_ranges
from tierstore.optim import OptimizerSpec
from tierstore.placement import ShardingType, ShardPlacement, TablePlacement
from tierstore.sharding.shards import LocalShard, RankShards

wanted = ThreadFlag()
"""Set while this thread makes a sharded state dict."""


def sharded_state_dict(of: nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``of.state_dict()`` in which every rank has copies of its own shards only.

    ``of`` is a model, a collection, or the ``fused_optimizer`` of a DistributedModelParallel. Names are the
    unsharded model's. Weights and optimizer states of tables that are cut, or held by some ranks only, are
    ShardedTensors on the CPU, of the table's dtype and of float32; data-parallel tables and all other entries
    are as in ``state_dict()``. ``torch.distributed.checkpoint.save`` writes each shard from where it is, and
    ``load`` into the sharded state dict of a model with another plan cuts them anew;
    ``of.load_state_dict(state)`` writes them to the tiers. A table of which a rank would have to copy more
    than 1 GiB is left out, with its optimizer states: commits keep its rows, and loading is an error unless
    the table has these rows.

    All ranks call it.
    """
    with wanted.raised():
        return of.state_dict()


@dataclass(frozen=True)
class ShardedValues:
    """The weights of a sharded table, or a named part of its optimizer's ``state``."""

    shards: RankShards
    table: str
    state: str | None = None

    @property
    def placement(self) -> TablePlacement:
        return self.shards.plan.table(self.table)

    @property
    def are_sharded(self) -> bool:
        """Whether a state dict that this thread makes now has the values as a ShardedTensor."""
        return wanted.on and self.placement.sharding_type is not ShardingType.DATA_PARALLEL

    @property
    def are_small(self) -> bool:
        """Whether every rank can copy its shards into a state dict."""
        held: dict[int, int] = {}
        for part in self._shown():
            held[part.rank] = held.get(part.rank, 0) + self._dtype.itemsize * int(
                np.prod(self._cell(part)[1])
            )
        return max(held.values()) <= STATE_DICT_LIMIT

    def view(self) -> Any:
        """Return a ShardedTensor with copies of this rank's shards: (rows, columns), or (rows,) of state kept
        per row."""
        from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
        from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
        from torch.distributed._shard.sharding_spec import ShardMetadata

        group = self.shards.env.process_group
        described = {}
        for part in self._shown():
            offsets, sizes = self._cell(part)
            place = f"rank:{dist.get_global_rank(group, part.rank)}/cpu"
            described[offsets] = ShardMetadata(list(offsets), list(sizes), place)
        shards = []
        for local in self.shards.of(self.table):
            metadata = described.get(self._offsets(local))
            if metadata is None or local.columns.start == local.columns.stop:
                continue
            copy = torch.empty(metadata.shard_sizes, dtype=self._dtype, device="cpu")
            begin, end = local.rows
            for first, last in id_ranges(begin, end):
                copy[first - begin : last - begin] = torch.from_numpy(self._read(local, first, last))
            shards.append(Shard(copy, metadata))
        table = self.placement
        shape = (table.num_embeddings,) if self._per_row else (table.num_embeddings, table.embedding_dim)
        whole = ShardedTensorMetadata(
            list(described.values()), torch.Size(shape), TensorProperties(dtype=self._dtype)
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(shards, whole, process_group=group)

    def load(self, view: Any, key: str) -> None:
        """Write this rank's shards of a ShardedTensor. Raises InputError on every rank if the tensor is cut
        otherwise."""
        group = self.shards.env.process_group
        found = {
            (tuple(shard.shard_offsets), tuple(shard.shard_sizes), shard.placement.rank())
            for shard in view.metadata().shards_metadata
        }
        if found != {(*self._cell(p), dist.get_global_rank(group, p.rank)) for p in self._shown()}:
            raise InputError(
                f"{key} is cut in another way than this model's plan says; load the checkpoint by "
                "torch.distributed.checkpoint.load into sharded_state_dict(...), which cuts it anew"
            )
        given = {tuple(s.metadata.shard_offsets): s.tensor.detach() for s in view.local_shards()}
        if self._per_row and any(part.column_start for part in self.placement.shards):
            self._load_for_all_columns(given)
            return
        for local in self.shards.of(self.table):
            begin, end = local.rows
            values = given.get(self._offsets(local))
            if values is None:  # a shard of no rows
                continue
            for first, last in id_ranges(begin, end):
                self._write(local, first, last, values[first - begin : last - begin].float().numpy())

    def _load_for_all_columns(self, given: dict[tuple[int, ...], Tensor]) -> None:
        """Load state kept per row, which all columns' shards have, from the first columns' in the view."""
        for first, last in id_ranges(0, self.placement.num_embeddings):
            values = torch.zeros(last - first, dtype=torch.float32, device="cpu")
            for (begin,), piece in given.items():
                low, high = max(first, begin), min(last, begin + len(piece))
                if low < high:
                    values[low - first : high - first] = piece[low - begin : high - begin]
            self.shards.env.sum_bits(values)
            for local in self.shards.of(self.table):
                low, high = max(first, local.rows[0]), min(last, local.rows[1])
                if low < high:
                    self._write(local, low, high, values[low - first : high - first].numpy())

    @property
    def _dtype(self) -> torch.dtype:
        if self.state is not None:
            return torch.float32
        return TORCH_DTYPES[self.shards.dtype_of(self.table)]

    @property
    def _spec(self) -> OptimizerSpec:
        return self.shards.fused_optimizer.spec_of(self.table)

    @property
    def _per_row(self) -> bool:
        return self.state in self._spec.per_row

    def _shown(self) -> Sequence[ShardPlacement]:
        """Return the shards that a view has."""
        shards = [part for part in self.placement.shards if part.rows and part.columns]
        return [part for part in shards if not part.column_start] if self._per_row else shards

    def _cell(self, part: ShardPlacement) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes of a shard in the view."""
        if self._per_row:
            return (part.row_start,), (part.rows,)
        return (part.row_start, part.column_start), (part.rows, part.columns)

    def _offsets(self, local: LocalShard) -> tuple[int, ...]:
        """Return the offsets of a shard of this rank; empty for columns that the view does not have."""
        if not self._per_row:
            return local.rows[0], local.columns.start
        return (local.rows[0],) if local.columns.start == 0 else ()

    def _columns(self, local: LocalShard) -> Any:
        """Return which floats of the state of this rank's shard they are."""
        width = local.columns.stop - local.columns.start
        columns = self._spec.state_columns(width)[self.state or ""]
        start = columns.start - width
        return start if self._per_row else slice(start, columns.stop - width)

    def _read(self, local: LocalShard, first: int, last: int) -> NDArray[np.float32]:
        weight, state = self.shards.engine.read_rows(local.local, np.arange(first, last))
        return weight if self.state is None else state[:, self._columns(local)]

    def _write(self, local: LocalShard, first: int, last: int, values: NDArray[np.float32]) -> None:
        engine, ids = self.shards.engine, np.arange(first, last)
        if self.state is None:
            of_now = self.shards.state_as_of_now(self.table, local, ids)
            engine.write_rows(local.local, ids, values, of_now)
            return
        _, state = engine.read_rows(local.local, ids)
        state[:, self._columns(local)] = values
        engine.write_rows(local.local, ids, None, state)
