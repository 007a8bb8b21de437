"""nn.Module front ends: drop-ins for torch's embeddings and torchrec's collections, and offload()."""

from tierstore.cache.device import OPENERS
from tierstore.modules.accumulation import Accumulation, accumulate
from tierstore.modules.configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    from_torchrec,
)
from tierstore.modules.embedding import TieredEmbedding
from tierstore.modules.embedding_bag import TieredEmbeddingBag
from tierstore.modules.embedding_bag_collection import EmbeddingBagCollection
from tierstore.modules.embedding_collection import EmbeddingCollection
from tierstore.modules.gpu import open_cuda
from tierstore.modules.offloading import Offloaded, offload

OPENERS["cuda"] = open_cuda

__all__ = [
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
    "from_torchrec",
    "offload",
]
