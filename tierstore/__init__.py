"""Embedding tables larger than memory, trained bit for bit as if in memory.

Names are imported when they are first used: ``import tierstore`` and ``tierstore --help`` cost little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tierstore.default_planner import register_default_planner

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierstore.cache.engine import set_num_threads
    from tierstore.config import TableOverride, TierConfig
    from tierstore.default_config import set_default_config
    from tierstore.errors import (
        ClosedError,
        ConfigError,
        GpuError,
        GradientError,
        InputError,
        PolicyFaultError,
        RankError,
        StoreCorruptError,
        StoreFullError,
        StoreIOError,
        StoreLockedError,
        StoreMismatchError,
        TierFullError,
        TierStoreError,
    )
    from tierstore.modules import (
        Accumulation,
        DataType,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        Offloaded,
        PoolingType,
        TieredEmbedding,
        TieredEmbeddingBag,
        accumulate,
        offload,
    )
    from tierstore.pipeline.prefetch import prefetch
    from tierstore.pipeline.prefetch_pipeline import PrefetchPipeline
    from tierstore.placement import Job, ShardingPlan
    from tierstore.sparse import (
        JaggedTensor,
        KeyedJaggedTensor,
        KeyedTensor,
    )

_HOME = {
    "cache.engine": ["set_num_threads"],
    "config": ["TableOverride", "TierConfig"],
    "default_config": ["set_default_config"],
    "errors": [
        "ClosedError",
        "ConfigError",
        "GpuError",
        "GradientError",
        "InputError",
        "PolicyFaultError",
        "RankError",
        "StoreCorruptError",
        "StoreFullError",
        "StoreIOError",
        "StoreLockedError",
        "StoreMismatchError",
        "TierFullError",
        "TierStoreError",
    ],
    "modules": [
        "Accumulation",
        "DataType",
        "EmbeddingBagCollection",
        "EmbeddingBagConfig",
        "EmbeddingCollection",
        "EmbeddingConfig",
        "Offloaded",
        "PoolingType",
        "TieredEmbedding",
        "TieredEmbeddingBag",
        "accumulate",
        "offload",
    ],
    "pipeline.prefetch": ["prefetch"],
    "pipeline.prefetch_pipeline": ["PrefetchPipeline"],
    "sparse": [
        "JaggedTensor",
        "KeyedJaggedTensor",
        "KeyedTensor",
    ],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = [
    "checkpoint",
    "data",
    "errors",
    "initializers",
    "models",
    "modules",
    "optim",
    "sparse",
    "torchrec",
]

__all__ = [
    "Accumulation",
    "ClosedError",
    "ConfigError",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "GpuError",
    "GradientError",
    "InputError",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Offloaded",
    "PolicyFaultError",
    "PoolingType",
    "PrefetchPipeline",
    "RankError",
    "StoreCorruptError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "StoreMismatchError",
    "TableOverride",
    "TierConfig",
    "TierFullError",
    "TierStoreError",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "__version__",
    "accumulate",
    "offload",
    "prefetch",
    "set_default_config",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"tierstore.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    value = getattr(import_module(f"tierstore.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


def _plan_job(module: Any, job: Job, group: Any) -> ShardingPlan:
    from tierstore.planner.planner import plan_job

    return plan_job(module, job, group)


register_default_planner(_plan_job)
