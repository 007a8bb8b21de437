"""The fused optimizers of a model's sharded tables as one optimizer, keyed by the names of the weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import ConfigError
from tierstore.modules.left_out import STATE_DICT_LIMIT, check_mark, is_mark, mark
from tierstore.modules.optimizer_states import LEFT_OUT
from tierstore.modules.tables import id_ranges, rows_are_left_out
from tierstore.optim.fused import AppliedOptimizer
from tierstore.sharding import shard_views
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.shard_views import ShardedValues


class KeyedFusedOptimizer(AppliedOptimizer):
    """A KeyedOptimizer, as torchrec calls it: ``params``, ``state`` and ``state_dict()`` go by weight names.

    The backward passes apply it; ``step()`` and ``zero_grad()`` do nothing, and ``param_groups`` (those of
    each collection) are read at every backward pass. The optimizer can be combined with the optimizer of the
    dense parameters, also by torchrec's CombinedOptimizer (``CombinedOptimizer([("", dmp.fused_optimizer),
    ...])``).

    ``params``: name → tensor without data, of the table's shape.
    """

    def __init__(self, collections: Mapping[str, ShardedCollection]) -> None:
        # torch's own constructor would copy the parameter groups, which the collections must share
        self._optimizer_step_pre_hooks: dict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: dict[int, Callable[..., Any]] = OrderedDict()
        self.defaults: dict[str, Any] = {"_save_param_groups": False}
        self._collections = {name: c for name, c in collections.items() if c.has_optimizer}
        self.params: dict[str, Tensor] = {}
        self._tables: dict[str, tuple[ShardedCollection, Any]] = {}
        self._keys: list[list[str]] = []
        for path, collection in self._collections.items():
            prefix = f"{path}." if path else ""
            keys = []
            for table in collection.configs:
                keys.append(f"{prefix}{collection.views_name}.{table.name}.weight")
                shape = (table.num_embeddings, table.embedding_dim)
                self.params[keys[-1]] = torch.empty(shape, dtype=torch.float32, device="meta")
                self._tables[keys[-1]] = (collection, table)
            key_of = dict(zip((table.name for table in collection.configs), keys, strict=True))
            fused = collection.fused_optimizer
            for group, shown in zip(fused.groups, fused.param_groups, strict=True):
                self._keys.append([key_of[name] for name in group.tables])
                shown["params"] = [self.params[key] for key in self._keys[-1]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [g for c in self._collections.values() for g in c.fused_optimizer.param_groups]

    @property
    def _opt_called(self) -> bool:
        """Whether there was an update; schedulers read this."""
        return any(getattr(c.fused_optimizer, "_opt_called", False) for c in self._collections.values())

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        """Ignore ``value``: updates come with backward passes, not with ``step()``."""

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """State as whole tensors, on every rank; all ranks read it together. See :meth:`state_dict`."""
        return {self.params[key]: self._state_of(key) for key in self.params}

    def add_param_group(self, param_group: Any) -> None:
        raise ConfigError(
            "a fused optimizer has the groups of its collections; give other parameters an optimizer of "
            "their own"
        )

    def save_param_groups(self, save: bool) -> None:
        """Note ``save``, as torchrec's CombinedOptimizer asks; :meth:`state_dict` always has the groups."""
        self.defaults["_save_param_groups"] = save

    def post_load_state_dict(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return ``{"state": {weight: {"<table>.<state>": tensor}}, "param_groups": [...]}``, groups with
        names of weights.

        State is (rows,) or (rows, dim) float32, and ``<table>.step`` the number of updates. Tables beyond
        STATE_DICT_LIMIT bytes have a mark in place of their state, which commits keep. All ranks call it.
        """
        groups = [{**g, "params": keys} for g, keys in zip(self.param_groups, self._keys, strict=True)]
        if shard_views.wanted.on:
            # torch.distributed.checkpoint drops ShardedTensors of which a rank has nothing, then takes the
            # checkpoint for one of torch 2.3, in which lists had other keys if no tensor was in them
            groups = [
                {**group, "lr": torch.tensor(group["lr"], dtype=torch.float64, device="cpu")}
                for group in groups
            ]
        return {"state": {key: self._state_of(key) for key in self.params}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a :meth:`state_dict` of any plan. All ranks call it with the same state.

        Raises ConfigError for the state of another model or optimizer.
        """
        state, groups = state_dict.get("state", {}), state_dict.get("param_groups", [])
        if set(state) != set(self.params) or [sorted(g["params"]) for g in groups] != list(
            map(sorted, self._keys)
        ):
            raise ConfigError(
                f"this is not the state of these tables: {sorted(self.params)}, but of {sorted(state)}"
            )
        parts = {}
        for key, (_, table) in self._tables.items():
            parts[key] = {name.removeprefix(f"{table.name}."): value for name, value in state[key].items()}
            self._check(key, parts[key])
        for key, part in parts.items():
            self._load(key, part)
        for group, found in zip(self.param_groups, groups, strict=True):
            group.update({k: _plain(v) for k, v in found.items() if k != "params"})

    def _check(self, key: str, state: dict[str, Tensor]) -> None:
        collection, table = self._tables[key]
        spec = collection.fused_optimizer.spec_of(table.name)
        rows, dim = table.num_embeddings, table.embedding_dim
        shapes = {name: spec.state_shape(name, rows, dim) for name in spec.state_names}
        if is_mark(state.get(LEFT_OUT)):
            view = getattr(collection, collection.views_name)[table.name]
            check_mark(state.pop(LEFT_OUT), view.rows_version(), f"the optimizer state of {key}")
            return
        found = {name: tuple(value.size()) for name, value in state.items() if name != "step"}
        left_out = rows_are_left_out() and not found
        if "step" not in state or not (left_out or found == shapes):
            raise ConfigError(f"{key}: the state of {spec.name} must be {shapes}, not {found}")

    def _load(self, key: str, state: dict[str, Tensor]) -> None:
        """Load the state of one table; only its number of updates if the table was left out."""
        collection, table = self._tables[key]
        collection.fused_optimizer.num_updates = int(state["step"])
        whole = {}
        for name, value in state.items():
            if hasattr(value, "local_shards"):
                ShardedValues(collection.shards, table.name, name).load(value, f"{name} of {key}")
            elif name != "step":
                whole[name] = value
        for begin, end in id_ranges(0, table.num_embeddings) if whole else ():
            ids = torch.arange(begin, end, device="cpu")
            part = {name: value[begin:end] for name, value in whole.items()}
            collection.load_rows(ids, collection.rows(ids, table.name), part, table.name)

    def _state_of(self, key: str) -> dict[str, Tensor]:
        collection, table = self._tables[key]
        spec = collection.fused_optimizer.spec_of(table.name)
        rows, dim = table.num_embeddings, table.embedding_dim
        updates = float(collection.fused_optimizer.num_updates)
        state = {f"{table.name}.step": torch.tensor(updates, dtype=torch.float32, device="cpu")}
        if rows_are_left_out():
            return state
        parts = {name: ShardedValues(collection.shards, table.name, name) for name in spec.state_names}
        if all(part.are_sharded and part.are_small for part in parts.values()):
            return state | {f"{table.name}.{name}": part.view() for name, part in parts.items()}
        if 4 * rows * max((spec.width(name, dim) for name in parts), default=0) > STATE_DICT_LIMIT:
            view = getattr(collection, collection.views_name)[table.name]
            return state | {f"{table.name}.{LEFT_OUT}": mark(view.rows_version(), view.table, key)}
        shapes = {name: spec.state_shape(name, rows, dim) for name in spec.state_names}
        found = {n: torch.empty(shape, dtype=torch.float32, device="cpu") for n, shape in shapes.items()}
        for begin, end in id_ranges(0, table.num_embeddings) if found else ():
            ids = torch.arange(begin, end, device="cpu")
            for name, values in collection.optimizer_rows(ids, table.name).items():
                found[name][begin:end] = values
        return state | {f"{table.name}.{name}": values for name, values in found.items()}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
