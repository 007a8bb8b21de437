"""DLRM and DCN v2 over any embedding bag collection, in the shape of torchrec's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tierstore.errors import ConfigError
from tierstore.models.layers import DotInteraction, LowRankCrossNet, OverArch, perceptron

Logs = tuple[Tensor, Tensor, Tensor]


class LabelledBatch(Protocol):
    """What ``DLRMTrain`` takes: tierstore.data.Batch, or any object with these three attributes."""

    @property
    def dense(self) -> Tensor: ...
    @property
    def sparse(self) -> Any: ...
    @property
    def labels(self) -> Tensor: ...


class DLRM(nn.Module):
    """Deep learning recommendation model: embeddings and a perceptron of the dense features, their dot
    products, and a perceptron on top. M. Naumov et al., arXiv:1906.00091.

    Args:
        embedding_bag_collection: KeyedJaggedTensor -> KeyedTensor, with ``embedding_bag_configs()``:
        tierstore's,
            torchrec's or ``DenseEmbeddingBags``. All tables must have one embedding_dim.
        dense_in_features: number of dense features.
        dense_arch_layer_sizes: outputs of the lower perceptron; the last must be the embedding_dim.
        over_arch_layer_sizes: outputs of the upper perceptron; the last is the number of logits, usually 1.
        dense_device: where the dense parts are made.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        dims = embedding_dims(embedding_bag_collection)
        if len(set(dims)) != 1:
            raise ConfigError(
                f"DLRM needs tables of one embedding_dim, not of {sorted(set(dims))}; DCNv2 takes any"
            )
        if list(dense_arch_layer_sizes)[-1:] != dims[:1]:
            raise ConfigError(
                f"dense_arch_layer_sizes must end with the embedding_dim {dims[0]}, "
                f"not {list(dense_arch_layer_sizes)}"
            )
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch = perceptron(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch = DotInteraction(len(dims), dense_device)
        over_in_features = dims[0] + len(dims) * (len(dims) + 1) // 2
        self.over_arch = OverArch(over_in_features, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        """Return logits (B, 1) of dense_features float32 (B, dense_in_features) and a KeyedJaggedTensor."""
        dense = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        size, dim = dense.shape  # a batch may be empty
        embeddings = pooled.reshape(size, pooled.shape[1] // dim, dim)
        return self.over_arch(self.inter_arch(dense, embeddings))


class DCNv2(nn.Module):
    """Deep and cross network v2: a low-rank cross network over all embeddings and the lower perceptron's
    output.

    Arguments as in ``DLRM``, but tables may differ in embedding_dim and the lower perceptron may end with any
    size. dcn_num_layers, dcn_low_rank_dim: of the cross network.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not dense_arch_layer_sizes:
            raise ConfigError("dense_arch_layer_sizes needs at least one layer")
        width = sum(embedding_dims(embedding_bag_collection)) + dense_arch_layer_sizes[-1]
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch = perceptron(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, dense_device)
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        """Return logits (B, 1) of dense_features float32 (B, dense_in_features) and a KeyedJaggedTensor."""
        dense = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        return self.over_arch(self.inter_arch(torch.cat([dense, pooled], dim=1)))


class DLRMTrain(nn.Module):
    """A model with its loss, binary cross entropy, as training pipelines want it: batch -> (loss,
    outputs).
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: LabelledBatch) -> tuple[Tensor, Logs]:
        """Return (loss, (loss, logits (B,), labels (B,))); the three in the inner tuple are detached."""
        logits = self.model(batch.dense, batch.sparse).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def embedding_dims(embedding_bag_collection: nn.Module) -> list[int]:
    """Return the embedding_dim of each output key of a collection, in the order of tables and features."""
    configs: Any = embedding_bag_collection.embedding_bag_configs()  # type: ignore[operator]
    if not configs:
        raise ConfigError("the embedding bag collection has no tables; give it at least one")
    return [config.embedding_dim for config in configs for _ in config.feature_names]
