"""Dense parts that the models share: perceptrons, the dot interaction, the low-rank cross network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tierstore.errors import ConfigError


def perceptron(in_features: int, sizes: Sequence[int], device: torch.device | None = None) -> nn.Sequential:
    """Make linear layers of the given output sizes, each followed by a ReLU."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(in_features, size, device=device), nn.ReLU()]
        in_features = size
    return nn.Sequential(*layers)


class OverArch(nn.Module):
    """The perceptron on top: ReLU after every layer but the last. (B, in_features) -> (B,
    layer_sizes[-1]).
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        if not layer_sizes:
            raise ConfigError("over_arch_layer_sizes needs at least the size of the output, as in [64, 1]")
        last_in = [in_features, *layer_sizes][-2]
        self.model = nn.Sequential(
            *perceptron(in_features, layer_sizes[:-1], device),
            nn.Linear(last_in, layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features)


class DotInteraction(nn.Module):
    """Dot products of every pair of the dense vector and the embeddings, after the dense vector itself.

    dense (B, D), embeddings (B, F, D) -> (B, D + F (F + 1) / 2), pairs in row order of the upper triangle.
    """

    pairs: Tensor

    def __init__(self, num_features: int, device: torch.device | None = None) -> None:
        super().__init__()
        vectors = num_features + 1
        first, second = torch.triu_indices(vectors, vectors, offset=1, device=device)
        self.register_buffer("pairs", first * vectors + second, persistent=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self.pairs)], dim=1)


class LowRankCrossNet(nn.Module):
    """Feature crosses of bounded degree: x[l+1] = x[0] * (W[l] V[l] x[l] + b[l]) + x[l], (B, N) -> (B, N).

    W is (N, rank), V (rank, N). R. Wang et al., "DCN V2", WWW 2021.
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        if num_layers < 1 or low_rank < 1:
            raise ConfigError(f"a cross network needs layers and rank >= 1, not {num_layers} and {low_rank}")
        self.down = nn.ModuleList(
            nn.Linear(in_features, low_rank, bias=False, device=device) for _ in range(num_layers)
        )
        self.up = nn.ModuleList(nn.Linear(low_rank, in_features, device=device) for _ in range(num_layers))
        for layer in (*self.down, *self.up):
            nn.init.xavier_normal_(layer.weight)  # type: ignore[arg-type]
        for layer in self.up:
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        crossed = features
        for down, up in zip(self.down, self.up, strict=True):
            crossed = features * up(down(crossed)) + crossed
        return crossed
