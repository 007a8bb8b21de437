"""Unsharded collections, built as torchrec's scripts build them: the optimizer and the shards come later."""

from __future__ import annotations

from torchrec.modules import embedding_modules
from torchrec.sparse import jagged_tensor

from tierstore import modules, sparse

# The outputs of collections are tierstore's. They have torchrec's methods, so isinstance() of torchrec's
# classes, by which models, datasets and pipelines know them, holds.
jagged_tensor.JaggedTensor.register(sparse.JaggedTensor)
jagged_tensor.KeyedJaggedTensor.register(sparse.KeyedJaggedTensor)
jagged_tensor.KeyedTensor.register(sparse.KeyedTensor)
embedding_modules.EmbeddingBagCollectionInterface.register(modules.EmbeddingBagCollection)
embedding_modules.EmbeddingCollectionInterface.register(modules.EmbeddingCollection)


class EmbeddingBagCollection(modules.EmbeddingBagCollection):
    """:class:`tierstore.EmbeddingBagCollection` that is opened by the first call that needs a row.

    Until then ``apply_optimizer_in_backward``, a sharder's ``fused_params`` or an argument ``optimizer``
    chooses the optimizer, and ``DistributedModelParallel`` gives the tables to its ranks.
    """

    opens_late = True


class EmbeddingCollection(modules.EmbeddingCollection):
    """:class:`tierstore.EmbeddingCollection` that is opened late, as :class:`EmbeddingBagCollection` is."""

    opens_late = True
