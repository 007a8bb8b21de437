"""Plain PyTorch tables, with which tests and benchmarks compare tiered tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.errors import ConfigError
from tierstore.modules.configs import EmbeddingBagConfig, PoolingType
from tierstore.sparse import KeyedJaggedTensor, KeyedTensor


class DenseEmbeddingBags(nn.Module):
    """An embedding bag collection of ``nn.EmbeddingBag``, one per table: everything in memory, no own
    kernels.

    State-dict names, output keys and their order are as in ``EmbeddingBagCollection``.

    Args:
        tables: their configurations; initial values follow ``init_rule()``, with torch's random numbers.
        sparse: whether gradients of the weights are sparse, as ``torch.optim.SparseAdam``, ``SGD`` and
        ``Adagrad``
            take them.
        device: where the weights are made.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], sparse: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        self.embedding_bags = nn.ModuleDict()
        for config in self._configs:
            if config.name in self.embedding_bags:
                raise ConfigError(f"two tables are called {config.name!r}; rename one")
            self.embedding_bags[config.name] = nn.EmbeddingBag(
                config.num_embeddings,
                config.embedding_dim,
                mode=PoolingType(config.pooling.value).value.lower(),
                sparse=sparse,
                include_last_offset=True,
                device=device,
                _weight=_initial(config, device),
            )
        features = [feature for config in self._configs for feature in config.feature_names]
        self._keys = [
            f"{feature}@{config.name}" if features.count(feature) > 1 else feature
            for config in self._configs
            for feature in config.feature_names
        ]
        self._dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables."""
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows, (B, sum of the dims of all output keys)."""
        pooled = []
        for config in self._configs:
            bags = self.embedding_bags[config.name]
            for feature in config.feature_names:
                jagged = features[feature]
                pooled.append(bags(jagged.values(), jagged.offsets()))
        return KeyedTensor(self._keys, self._dims, torch.cat(pooled, dim=1))

    @torch.no_grad()
    def load_rows(self, table: str, ids: Tensor, weight: Tensor) -> None:
        """Set rows of a table: ids int64 (n,), weight float32 (n, embedding_dim)."""
        self.embedding_bags[table].weight[ids] = weight  # type: ignore[index, operator]


def _initial(config: EmbeddingBagConfig, device: torch.device | None) -> Tensor:
    weight = torch.empty(config.num_embeddings, config.embedding_dim, dtype=torch.float32, device=device)
    kind, first, second = config.init_rule()
    if kind == "uniform":
        return nn.init.uniform_(weight, first, second)
    return nn.init.normal_(weight, first, second) if kind == "normal" else nn.init.constant_(weight, first)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum per row, ``sum += mean(g^2); w -= lr g / (sqrt(sum) + eps)``, in plain torch
    operations.

    The optimizer takes parameters (rows, dim) with dense gradients, or sparse gradients, of which it touches
    the named rows.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update; a closure is not supported."""
        if closure is not None:
            raise ValueError("RowWiseAdagrad.step takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["eps"])

    def _update(self, parameter: Tensor, lr: float, eps: float) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter[:, 0])
        gradient: Tensor = parameter.grad  # type: ignore[assignment]
        if not gradient.is_sparse:
            state["sum"] += gradient.square().mean(dim=1)
            parameter -= lr * gradient / (state["sum"].sqrt() + eps).unsqueeze(1)
            return
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        sums = state["sum"][rows] + values.square().mean(dim=1)
        state["sum"][rows] = sums
        parameter.index_put_((rows,), parameter[rows] - lr * values / (sums.sqrt() + eps).unsqueeze(1))
