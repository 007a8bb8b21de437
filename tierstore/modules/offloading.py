"""offload(): replaces the embedding modules of a model by tiered ones, in place, with their weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tierstore.cache.engine import Engine, Table
from tierstore.cache.machine import check_machine
from tierstore.config import TierConfig, format_bytes
from tierstore.default_config import default_config
from tierstore.errors import ConfigError
from tierstore.initializers import normal
from tierstore.modules.applied import applied_optimizer
from tierstore.modules.base import TieredModule
from tierstore.modules.collection import Collection
from tierstore.modules.configs import BaseEmbeddingConfig, from_torchrec
from tierstore.modules.embedding import TieredEmbedding
from tierstore.modules.embedding_bag import TieredEmbeddingBag
from tierstore.modules.embedding_bag_collection import EmbeddingBagCollection
from tierstore.modules.embedding_collection import EmbeddingCollection
from tierstore.modules.engine_calls import EngineCalls
from tierstore.modules.features import table_of
from tierstore.modules.hooks import carry_hooks
from tierstore.modules.tables import (
    SharedEngine,
    check_device,
    check_unsupported,
    is_fresh,
    load_table,
    placed,
    table_dtype,
)
from tierstore.optim import NOT_GIVEN, SGD, OptimizerSpec
from tierstore.optim.fused import FusedOptimizer
from tierstore.optim.specs import NotGiven
from tierstore.optim.tables import Optimizers, by_table, check_optimizers

logger = logging.getLogger("tierstore")

# recognise torchrec's collections without importing it: (name of its tables, name of their modules)
_COLLECTIONS = (("embedding_bag_configs", "embedding_bags"), ("embedding_configs", "embeddings"))


class Offloaded(EngineCalls, Mapping[str, TieredModule]):
    """The tiered modules that were put in, by their path in the model. The modules share one engine, with all
    budgets.

    The object is a context manager, whose end closes it and commits if the configuration names a path.
    """

    def __init__(self, engine: Engine, modules: dict[str, TieredModule]) -> None:
        self.engine = engine
        self._modules = modules

    def __getitem__(self, path: str) -> TieredModule:
        return self._modules[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def optimizers(self) -> list[FusedOptimizer]:
        """The optimizer of every module that was not frozen when it was replaced; learning-rate schedulers
        take them."""
        return [module.fused_optimizer for module in self._modules.values() if module.has_optimizer]

    def close(self, *, commit: bool = True) -> None:
        """Close all modules, as :meth:`TieredModule.close` closes one."""
        for module in self._modules.values():
            module.close(commit=commit)

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self.engine.warn_of_loss()
        self.close(commit=kind is None)

    def __repr__(self) -> str:
        size = sum(4 * table.num_embeddings * table.embedding_dim for table in self.engine.tables)
        return f"Offloaded({len(self.engine.tables)} tables of {format_bytes(size)} in {list(self._modules)})"


def offload(
    model: nn.Module,
    config: TierConfig | None = None,
    optimizer: Optimizers = NOT_GIVEN,
    *,
    seed: int = 0,
) -> Offloaded:
    """Replace every nn.Embedding, nn.EmbeddingBag and unsharded torchrec collection of ``model``, in place.

    Weights are kept, and forward and backward hooks; modules whose weights do not require gradients stay
    frozen; subclasses are left alone. Weights on the meta device, as of a table that memory has no room for,
    begin with initial values: normal(0, 1) for torch's modules, the configuration's initial values for
    collections. Without ``optimizer``, tables have the one that ``apply_optimizer_in_backward`` gave their
    weights. From then on backward passes apply ``optimizer`` to the rows, so build the optimizer of the dense
    parameters from ``model.parameters()`` afterwards. ``optimizer`` may be a dict of optimizers by the paths
    of tables (``"*"``: all others); tables of collections are ``<path>.<table>``. If ``config.path`` holds a
    commit, its rows are used, not the model's.

    Raises ConfigError, having changed nothing, if there is nothing to replace, or something that cannot be:
    weights that other modules share, or that are not float32, float16 or bfloat16; embeddings on several
    devices; weights of which only some have an applied optimizer; max_norm; scale_grad_by_freq. Tables are on
    the device that weights with values were on, or on the CPU, unless ``config`` names one.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {model!r}; give an nn.Module that has embeddings")
    check_optimizers(optimizer)
    found = _find(model)
    for path, module in found.items():
        _check(path, module, model)
    if isinstance(optimizer, NotGiven):
        optimizer = _applied(found) or optimizer
    each = _optimizers(found, optimizer)
    tables = [table for path, module in found.items() for table in _tables(path, module)]
    if isinstance(optimizer, Mapping):
        tables = [replace(table, optimizer=each[table.name] or SGD()) for table in tables]
    config = default_config() if config is None else config
    check_machine(config)
    device = _device_of(found)
    config = placed(config, device if config.device is None and device.type != "cpu" else None)
    one = optimizer if isinstance(optimizer, OptimizerSpec) else SGD()
    engine = Engine(tables, config, one, seed)
    try:
        replaced = {
            path: _replacement(path, module, engine, _own_optimizer(path, module, optimizer, each))
            for path, module in found.items()
        }
        engine.reset_stats()
    except BaseException:
        engine.close(commit=False)
        raise
    for path, new in replaced.items():
        carry_hooks(found[path], new)
    new_of = {id(found[path]): module for path, module in replaced.items()}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in new_of:
                setattr(parent, name, new_of[id(child)])
    return Offloaded(engine, replaced)


def _optimizers(found: Mapping[str, nn.Module], optimizer: Optimizers) -> dict[str, OptimizerSpec | None]:
    """Return the optimizer of each table; None: it is frozen."""
    trained: dict[str, bool] = {}
    for path, module in found.items():
        trained |= dict.fromkeys((t.name for t in _tables(path, module)), not _is_frozen(path, module))
    if isinstance(optimizer, Mapping):
        optimizer = {name: one for name, one in optimizer.items() if trained.get(name, True)}
    each = by_table(optimizer, [name for name in trained if trained[name]])
    return {name: each.get(name) for name in trained}


def _own_optimizer(
    path: str, module: nn.Module, optimizer: Optimizers, each: Mapping[str, OptimizerSpec | None]
) -> Optimizers:
    """Return the optimizer of one module: of its only table, or of each of its tables by name."""
    if _is_frozen(path, module):
        return None
    if not isinstance(optimizer, Mapping):
        return optimizer
    if _collection_kind(module) is None:
        return each[path]
    return {config.name: each[f"{path}.{config.name}"] for config in _configs(module)}


def _find(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to replace by the first of their paths; tables of a collection are part of it."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, TieredModule) or _collection_kind(module) is not None:
            inside.update(id(child) for child in module.modules())
        if type(module) in (nn.Embedding, nn.EmbeddingBag) or _collection_kind(module) is not None:
            if not path:
                raise ConfigError(
                    f"the model itself is a {type(module).__name__} and cannot be replaced in place; build "
                    "its tiered counterpart, or wrap it in a module"
                )
            found[path] = module
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            logger.warning("offload: %s is a %s and was left alone", path, type(module).__name__)
    if not found:
        raise ConfigError(
            "the model has no nn.Embedding, nn.EmbeddingBag or torchrec collection to offload; offload its "
            "parent module"
        )
    return found


def _collection_kind(module: nn.Module) -> tuple[str, str] | None:
    if isinstance(module, TieredModule):
        return None
    for configs, tables in _COLLECTIONS:
        if callable(getattr(module, configs, None)) and isinstance(
            getattr(module, tables, None), nn.ModuleDict
        ):
            return configs, tables
    return None


def _embeddings(path: str, module: nn.Module) -> dict[str, Any]:
    """Return the nn.Embedding(Bag)s of a module by path."""
    kind = _collection_kind(module)
    if kind is None:
        return {path: module}
    return {f"{path}.{kind[1]}.{name}": child for name, child in getattr(module, kind[1]).items()}


def _check(path: str, module: nn.Module, model: nn.Module) -> None:
    for own, embedding in _embeddings(path, module).items():
        if not isinstance(embedding, nn.Embedding | nn.EmbeddingBag):
            raise ConfigError(
                f"{own} is a {type(embedding).__name__}; only torch's embeddings can be offloaded"
            )
        try:
            check_unsupported(embedding.max_norm, embedding.scale_grad_by_freq)
            if not embedding.weight.is_meta:
                check_device(embedding.weight.device)
            table_dtype(embedding.weight.dtype)
        except ConfigError as error:
            raise ConfigError(f"{own}: {error}") from None
        _check_not_shared(own, embedding, model)
    _is_frozen(path, module)


def _device_of(found: Mapping[str, nn.Module]) -> torch.device:
    """Return the device of all weights that have values, where the tables will be; the CPU if none has.

    Raises ConfigError if there are several."""
    weights = [e.weight for path, module in found.items() for e in _embeddings(path, module).values()]
    if len(different := {weight.device for weight in weights if not weight.is_meta}) > 1:
        raise ConfigError(
            f"the embeddings are on {', '.join(sorted(map(str, different)))}; move the model to one device "
            "before it is offloaded"
        )
    return different.pop() if different else torch.device("cpu")


def _check_not_shared(path: str, embedding: nn.Module, model: nn.Module) -> None:
    owners = {
        id(child): name or "the model itself"
        for name, child in model.named_modules()
        if child is not embedding and any(p is embedding.weight for p in child.parameters(recurse=False))
    }
    if owners:
        raise ConfigError(
            f"{path} shares its weight with {', '.join(owners.values())}, which would be left with a tensor "
            "that is no longer trained; untie them"
        )


def _is_frozen(path: str, module: nn.Module) -> bool:
    trained = {own: e.weight.requires_grad for own, e in _embeddings(path, module).items()}
    if any(trained.values()) and not all(trained.values()):
        raise ConfigError(
            f"{path} has frozen and trained tables {trained}; set requires_grad alike in one collection"
        )
    return not any(trained.values())


def _applied(found: Mapping[str, nn.Module]) -> Optimizers:
    """Return what was applied to the weights of all modules that are not frozen, if anything was."""
    trained = {path: module for path, module in found.items() if not _is_frozen(path, module)}
    weights = [e.weight for path, module in trained.items() for e in _embeddings(path, module).values()]
    names = [table.name for path, module in trained.items() for table in _tables(path, module)]
    return applied_optimizer(weights, names)


def _configs(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Return our configurations of a torchrec collection's tables; initial values do not matter where weights
    are loaded."""
    kind = _collection_kind(module)
    assert kind is not None
    tables = getattr(module, kind[1])
    return [
        from_torchrec(config if tables[config.name].weight.is_meta else replace(config, init_fn=None))
        for config in getattr(module, kind[0])()
    ]


def _tables(path: str, module: Any) -> list[Table]:
    """Return the tables of a module, named by their paths."""
    if _collection_kind(module) is None:
        dtype = table_dtype(module.weight.dtype)
        return [Table(path, module.num_embeddings, module.embedding_dim, normal(0.0, 1.0), dtype=dtype)]
    return [replace(table_of(config), name=f"{path}.{config.name}") for config in _configs(module)]


def _replacement(path: str, module: nn.Module, engine: Engine, optimizer: Optimizers) -> TieredModule:
    if _collection_kind(module) is None:
        new = _embedding(path, module, optimizer, SharedEngine(engine))
    else:
        new = _collection(path, module, optimizer, SharedEngine(engine, f"{path}."))
    return new.train(module.training)


def _embedding(path: str, old: Any, optimizer: Optimizers, shared: SharedEngine) -> TieredModule:
    size = (old.num_embeddings, old.embedding_dim)
    weight = None if old.weight.is_meta else old.weight
    options: dict[str, Any] = {"_weight": weight, "padding_idx": old.padding_idx, "name": path}
    options["dtype"] = old.weight.dtype
    options |= {"optimizer": optimizer, "_shared": shared}
    if isinstance(old, nn.Embedding):
        return TieredEmbedding(*size, **options)
    return TieredEmbeddingBag(*size, mode=old.mode, include_last_offset=old.include_last_offset, **options)


def _collection(path: str, old: Any, optimizer: Optimizers, shared: SharedEngine) -> TieredModule:
    new: Collection
    if hasattr(old, "embedding_bag_configs"):
        new = EmbeddingBagCollection(_configs(old), old.is_weighted(), optimizer=optimizer, _shared=shared)
    else:
        new = EmbeddingCollection(
            _configs(old), need_indices=old.need_indices(), optimizer=optimizer, _shared=shared
        )
    if is_fresh(shared.engine):
        for own, embedding in _embeddings(path, old).items():
            if not embedding.weight.is_meta:
                view: Any = new.get_submodule(own.removeprefix(f"{path}."))
                load_table(view, view.table, embedding.weight, own)
    return new
