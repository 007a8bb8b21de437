"""torchrec's sharders: which sharding types and tiers a kind of collection may have, and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel

from tierstore import modules
from tierstore.errors import ConfigError
from tierstore.modules.collection import Collection
from tierstore.placement import ShardingType
from tierstore.torchrec.collections import EmbeddingBagCollection, EmbeddingCollection
from tierstore.torchrec.comms import comms_of
from tierstore.torchrec.fused_params import FusedParams

_KERNELS = (
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
    EmbeddingComputeKernel.KEY_VALUE,
)


class TieredSharder(BaseEmbeddingSharder[Any]):
    """Base of the sharders: torchrec's, of a collection in tiers.

    A subclass may override ``sharding_types`` and ``compute_kernels``; the planner then allows only those.
    """

    serves: ClassVar[type[Collection]]
    """The collections that it shards."""

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        sharded_module_order_overwrite: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            None if fused_params is None else dict(fused_params),
            qcomm_codecs_registry,  # type: ignore[arg-type]
        )
        if sharded_module_order_overwrite:
            raise ConfigError(
                "sharded_module_order_overwrite: outputs have the order of the tables; leave it out"
            )
        self.settings = FusedParams.of(fused_params)
        self.comms = comms_of(qcomm_codecs_registry)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all sharding types, on every device."""
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return kernels that stand for all tiers."""
        return [kernel.value for kernel in _KERNELS]

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the parameters that stand for the tables, by table."""
        views = getattr(module, module.views_name)
        return {name: parameter for name, view in views.items() for parameter in view.parameters()}

    def shard(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ConfigError: DistributedModelParallel shards."""
        raise ConfigError(
            "a sharder of tierstore.torchrec says how collections may be sharded; give it to "
            "DistributedModelParallel(..., sharders=[...]), or use tierstore.sharding.shard(collection, plan)"
        )


class EmbeddingBagCollectionSharder(TieredSharder):
    """The sharder of EmbeddingBagCollections, with torchrec's arguments."""

    serves = modules.EmbeddingBagCollection

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        return EmbeddingBagCollection


class EmbeddingCollectionSharder(TieredSharder):
    """The sharder of EmbeddingCollections, with torchrec's arguments."""

    serves = modules.EmbeddingCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self.use_index_dedup = use_index_dedup

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        return EmbeddingCollection


def get_default_sharders() -> list[TieredSharder]:
    """Return a sharder of each kind of collection, without any demand."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def sharders_of(given: Sequence[object] | None) -> list[TieredSharder]:
    """Return the sharders given, or the default ones for None. Raises ConfigError for a sharder of others."""
    sharders = get_default_sharders() if given is None else list(given)
    for sharder in sharders:
        if not isinstance(sharder, TieredSharder):
            raise ConfigError(
                f"sharders has a {type(sharder).__module__}.{type(sharder).__name__}; use the sharders of "
                "tierstore.torchrec, EmbeddingBagCollectionSharder and EmbeddingCollectionSharder"
            )
    return sharders  # type: ignore[return-value]


def sharder_of(collection: Collection, sharders: Sequence[TieredSharder]) -> TieredSharder | None:
    """Return the sharder of a collection; None if there is none, and it is sharded without demands."""
    for sharder in sharders:
        if isinstance(collection, sharder.serves):
            return sharder
    return None
