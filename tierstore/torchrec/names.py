"""The names of torchrec that tiers change, by the module in which torchrec defines them."""

from __future__ import annotations

HERE = "tierstore.torchrec"

OURS = {
    "torchrec.modules.embedding_modules:EmbeddingBagCollection": (
        f"{HERE}.collections:EmbeddingBagCollection"
    ),
    "torchrec.modules.embedding_modules:EmbeddingCollection": f"{HERE}.collections:EmbeddingCollection",
    "torchrec.distributed.embeddingbag:EmbeddingBagCollectionSharder": (
        f"{HERE}.sharders:EmbeddingBagCollectionSharder"
    ),
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": (
        "tierstore.sharding:ShardedEmbeddingBagCollection"
    ),
    "torchrec.distributed.embedding:EmbeddingCollectionSharder": (
        f"{HERE}.sharders:EmbeddingCollectionSharder"
    ),
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": (
        "tierstore.sharding:ShardedEmbeddingCollection"
    ),
    "torchrec.distributed.sharding_plan:get_default_sharders": f"{HERE}.sharders:get_default_sharders",
    "torchrec.distributed.model_parallel:DistributedModelParallel": (
        f"{HERE}.parallel:DistributedModelParallel"
    ),
    "torchrec.distributed.planner.planners:EmbeddingShardingPlanner": (
        f"{HERE}.planning:EmbeddingShardingPlanner"
    ),
    "torchrec.distributed.planner.types:Topology": f"{HERE}.machines:Topology",
    "torchrec.distributed.planner.storage_reservations:HeuristicalStorageReservation": (
        f"{HERE}.machines:HeuristicalStorageReservation"
    ),
    "torchrec.distributed.planner.storage_reservations:FixedPercentageStorageReservation": (
        f"{HERE}.machines:FixedPercentageStorageReservation"
    ),
    "torchrec.distributed.planner.storage_reservations:FixedAbsoluteStorageReservation": (
        f"{HERE}.machines:FixedAbsoluteStorageReservation"
    ),
    "torchrec.distributed.types:ShardingPlan": "tierstore.placement:ShardingPlan",
    "torchrec.distributed.fbgemm_qcomm_codec:get_qcomm_codecs_registry": (
        f"{HERE}.comms:get_qcomm_codecs_registry"
    ),
    "torchrec.distributed.train_pipeline.train_pipelines:TrainPipelineSparseDist": (
        f"{HERE}.pipelines:TrainPipelineSparseDist"
    ),
    "torchrec.distributed.train_pipeline.train_pipelines:PrefetchTrainPipelineSparseDist": (
        f"{HERE}.pipelines:PrefetchTrainPipelineSparseDist"
    ),
    "torchrec.distributed.train_pipeline.train_pipelines:EvalPipelineSparseDist": (
        f"{HERE}.pipelines:EvalPipelineSparseDist"
    ),
    "torchrec.optim.keyed:CombinedOptimizer": f"{HERE}.optimizers:CombinedOptimizer",
}
"""Where the name is defined here, by where torchrec defines it."""

_DMP = "its tables would not be in tiers; give a model with {} to DistributedModelParallel"
_OF_MODEL = _DMP.format("EmbeddingBagCollection or EmbeddingCollection")
_FUSED = (
    "its tables would not be in tiers; use EmbeddingBagCollection or EmbeddingCollection, whose backward "
    "pass applies the optimizer of apply_optimizer_in_backward"
)
_ROWS = "its tables would not be in tiers, which never drop or remap rows; give ids below 2^48 to {}"
_BAGS, _SEQUENCES = _ROWS.format("EmbeddingBagCollection"), _ROWS.format("EmbeddingCollection")
_PLANNED = "plans of tiers are made by EmbeddingShardingPlanner, from the budgets of a TierConfig"
_BY_HAND = (
    "plans of tiers are made by EmbeddingShardingPlanner or tierstore.sharding.construct_plan, whose cuts "
    "have the same names"
)

REFUSED = {
    "torchrec.modules.fused_embedding_modules:FusedEmbeddingBagCollection": _FUSED,
    "torchrec.modules.fused_embedding_modules:FusedEmbeddingCollection": _FUSED,
    "torchrec.modules.fused_embedding_modules:fuse_embedding_optimizer": _FUSED,
    "torchrec.modules.mc_embedding_modules:ManagedCollisionEmbeddingBagCollection": _BAGS,
    "torchrec.modules.mc_embedding_modules:ManagedCollisionEmbeddingCollection": _SEQUENCES,
    "torchrec.modules.itep_embedding_modules:ITEPEmbeddingBagCollection": _BAGS,
    "torchrec.modules.itep_embedding_modules:ITEPEmbeddingCollection": _SEQUENCES,
    "torchrec.distributed.model_parallel:DMPCollection": _OF_MODEL,
    "torchrec.distributed.model_parallel:HybridEvalDMP": _OF_MODEL,
    "torchrec.distributed.shard:shard": "use tierstore.sharding.shard(collection, plan)",
    "torchrec.distributed.shard:shard_modules": _OF_MODEL,
    "torchrec.distributed.embeddingbag:EmbeddingBagSharder": _DMP.format("an EmbeddingBagCollection"),
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBag": _DMP.format("an EmbeddingBagCollection"),
    "torchrec.distributed.fused_embeddingbag:FusedEmbeddingBagCollectionSharder": _FUSED,
    "torchrec.distributed.fused_embedding:FusedEmbeddingCollectionSharder": _FUSED,
    "torchrec.distributed.planner.types:TopologyFactory": f"{_PLANNED} and a Topology",
    "torchrec.distributed.sharding_plan:construct_module_sharding_plan": _BY_HAND,
    "torchrec.distributed.sharding_plan:get_module_to_default_sharders": _OF_MODEL,
    "torchrec.distributed.types:EmbeddingModuleShardingPlan": _BY_HAND,
}
"""Names that raise ConfigError, with the reason and what to use."""
