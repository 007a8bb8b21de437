"""Storage and planners by which dcp.save and dcp.load use the stores' commits.

Every rank writes its share of the state dict (tensors, also of DTensors; other values as JSON) to a
safetensors file and commits its stores; then the coordinator makes the files one checkpoint and, for sharded
collections, replaces the record of the commit of all ranks, which is the atomic step. Nothing is pickled.
Rows are in the commits: leave them out of the state dict by :func:`tierstore.checkpoint.without_rows`.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tierstore.checkpoint import ranks, training
from tierstore.checkpoint.folder import Folder, Unit, write_tensors
from tierstore.checkpoint.state import engines_of, fused_optimizers, tiered_modules
from tierstore.checkpoint.tree import pack, unpack
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError

_OF_RANK = "(rank)"
"""Name of the value by which a rank sends the coordinator its file and its commits."""


class JsonSavePlanner(DefaultSavePlanner):
    """DCP's default planner, except that values that are no tensors become JSON instead of pickles."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        tensors: dict[str, Tensor] = {}
        packed = pack(object, write_item.index.fqn, tensors)
        if tensors:
            raise ConfigError(
                f"{write_item.index.fqn} has tensors inside of a value that DCP keeps whole; use dicts and "
                "lists"
            )
        return io.BytesIO(json.dumps(packed, allow_nan=False).encode())


class JsonLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner for checkpoints of :class:`JsonSavePlanner`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = unpack(json.loads(value.getvalue()), {})
        name = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            self.state_dict[name] = content
            return
        path = self.mappings[name]
        inside: Any = self.original_state_dict
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = content


class _Storage:
    """Base of reader and writer: the folder, and the model whose stores take part."""

    def __init__(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        self.checkpoint_id = Path(path)
        self.folder = Folder(path)
        self.modules = tiered_modules(model)
        self.collection = None
        if any(module.collective for module in self.modules.values()):
            self.collection = ranks.one_of(self.modules)
        self.engines = engines_of(self.modules)

    def updates(self) -> dict[str, int]:
        """Return the number of updates of each fused optimizer so far."""
        return {name: optimizer.num_updates for name, optimizer in fused_optimizers(self.modules).items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and Path(checkpoint_id) != self.checkpoint_id:
            raise ConfigError(
                f"checkpoint_id is {checkpoint_id}; it must be {self.checkpoint_id}, or left out"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class StorageWriter(_Storage, storage.StorageWriter):
    """Storage for ``dcp.save(state, storage_writer=StorageWriter(path, model, step=n),
    planner=JsonSavePlanner())``.

    The writer commits the stores of ``model`` with the files that it writes, and then removes the checkpoint
    before. A model that is not sharded must be in one process. All ranks must see ``path``.
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module, *, step: int = 0) -> None:
        super().__init__(path, model)
        self.step = step
        self._rank = 0
        self._holds = ExitStack()  # the coordinator: the folder's lock
        self._draft: Unit | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._holds.close()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.collection is None:
            training.check_stores(self.engines)
        elif self.collection.commits is None:
            raise ConfigError(ranks.NO_STORES)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.collection is None and len(plans) > 1:
            raise ConfigError(f"{len(plans)} ranks save a model that is not sharded; save it on one of them")
        self._holds.enter_context(self.folder.locked())
        if self.collection is None:
            training.check_owner(self.folder, self.engines)
        self._draft = self.folder.begin(self.step)
        common: dict[str, Any] = {
            "folder": str(self._draft.path),
            "tag": self._draft.tag,
            "commit": None,
        }
        if self.collection is not None:
            commits = self.collection.commits
            common["commit"] = commits.begin(ranks.extra_of(self._draft, commits.number + 1))
        self._common = common
        return [replace(plan, storage_data=common) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        common, name = plan.storage_data, f"rank{self._rank:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        results = []
        for number, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                data = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
            tensors[str(number)] = data = data.detach().cpu().clone(memory_format=torch.contiguous_format)
            results.append(WriteResult(item.index, data.nbytes, [name, str(number)]))
        own = {"file": name, "sum": write_tensors(Path(common["folder"], name), tensors)}
        own["commits"] = self._commit(common)
        results.append(WriteResult(MetadataIndex(_OF_RANK), 0, own))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _commit(self, common: Mapping[str, Any]) -> Any:
        if self.collection is not None:
            own = self.collection.commits.commit_own(common["commit"])
            self.collection.commits.count(common["commit"])  # DCP does not tell ranks of the end
            return own
        for engine in self.engines:
            training.commit_checkpoint(engine, {"step": self.step}, common["tag"])
        return None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._draft is not None
        everything = [result for of_rank in results for result in of_rank]
        said: list[Any] = [result.storage_data for result in everything if _is_of_rank(result)]
        content: dict[str, Any] = {
            "dcp": _as_json(metadata),
            "where": [[*_index(r.index), *r.storage_data] for r in everything if not _is_of_rank(r)],
            "updates": self.updates(),
            "stores": [training.describe(engine) for engine in self.engines if self.collection is None],
        }
        with self._holds:
            unit = self.folder.publish(self._draft, content, {own["file"]: own["sum"] for own in said})
            if self.collection is None:
                training.forget_old(self.folder, self.engines, keep=1)
            else:
                self.collection.commits.record(self._common["commit"], [own["commits"] for own in said])
                self.folder.remove_all_but([unit])


class StorageReader(_Storage, storage.StorageReader):
    """Storage for ``dcp.load(state, storage_reader=StorageReader(path, model), planner=JsonLoadPlanner())``.

    ``model`` is built as for the checkpoint; its tables go to the checkpoint's commits. Sharded tables have
    restored their commit already, on any number of ranks and with any plan, and must not have been trained
    since.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._unit = self._choose()
        state = self._unit.read_state("dcp")
        self._stores, self._updates = state["stores"], state["updates"]
        self._where = {
            MetadataIndex(name, offset, index): (file, key)
            for name, offset, index, file, key in state["where"]
        }
        return _from_json(state["dcp"])

    def _choose(self) -> Unit:
        unit = (
            training.choose(self.folder, self.engines, None)
            if self.collection is None
            else ranks.named_unit(self.folder, self.collection)
        )
        if unit is None:
            raise StoreMismatchError(
                f"{self.folder.path} holds no checkpoint of these tables; give the folder of their save"
            )
        return unit

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self.collection is None:
            training.compare_stores(self._unit, self._stores, self.engines)
        elif self._updates != self.updates():
            raise ConfigError(ranks.IN_USE)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index][0], []).append(item)
        for file, items in by_file.items():
            tensors = self._unit.read_tensors(file)
            for item in items:
                self._read(item, tensors[self._where[item.storage_index][1]], planner)
        if self.collection is None:
            for engine in self.engines:
                training.go_back(engine, self._unit)
            for module in self.modules.values():
                module.take_updates()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, tensor: Tensor, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(tensor.numpy().tobytes()))
            return
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _is_of_rank(result: WriteResult) -> bool:
    """Return whether a result is a rank's, and not of a value called _OF_RANK in the state dict."""
    return isinstance(result.storage_data, dict)


def _index(index: MetadataIndex) -> tuple[Any, Any, Any]:
    return index.fqn, None if index.offset is None else list(index.offset), index.index


def _as_json(metadata: Metadata) -> dict[str, Any]:
    entries = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
        else:
            entries[name] = {}
    return {"entries": entries, "planner": pack(metadata.planner_data, "planner_data", {})}


def _from_json(content: Mapping[str, Any]) -> Metadata:
    try:
        entries: dict[str, Any] = {}
        for name, entry in content["entries"].items():
            entries[name] = BytesStorageMetadata() if not entry else _tensor_metadata(entry)
        return Metadata(entries, planner_data=unpack(content["planner"], {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreCorruptError(
            f"the checkpoint's description of its tensors is damaged: {error!r}"
        ) from error


def _tensor_metadata(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in entry["chunks"]]
    properties = TensorProperties(dtype=unpack({"$dtype": entry["dtype"]}, {}))
    return TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
