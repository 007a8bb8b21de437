"""Tools that replace embeddings by quantized ones must not pass over tiered ones without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TieredEmbedding,
    TieredEmbeddingBag,
)
from tierstore.errors import ConfigError

MAKERS: dict[str, Callable[[], Any]] = {
    "bag collection": lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["f"])]),
    "collection": lambda: EmbeddingCollection([EmbeddingConfig(9, 4, "t", feature_names=["f"])]),
    "bag": lambda: TieredEmbeddingBag(9, 4),
    "embedding": lambda: TieredEmbedding(9, 4),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return nn.ModuleDict({"sparse": MAKERS[request.param](), "over": nn.Linear(4, 1)})


def test_torchrecs_quantize_inference_model(model: nn.Module) -> None:
    from torchrec.inference.modules import quantize_inference_model

    with pytest.raises(
        ConfigError, match=r"^sparse is a .* of tierstore, whose rows stay float32: quantize a"
    ):
        quantize_inference_model(model)


def test_torchrecs_quantize_embeddings(model: nn.Module) -> None:
    from torchrec.inference.modules import quantize_embeddings

    for _ in range(2):
        with pytest.raises(ConfigError, match="rows stay float32"):
            quantize_embeddings(model, torch.qint8, inplace=True)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_torchs_embeddings(model: nn.Module, kind: type[nn.Module]) -> None:
    spec = {kind: torch.ao.quantization.float_qparams_weight_only_qconfig}
    with pytest.raises(ConfigError, match="rows stay float32"):
        torch.ao.quantization.quantize_dynamic(model, spec, dtype=torch.quint8, inplace=True)


def test_dense_layers_beside_may_be_quantized(model: nn.Module) -> None:
    for _ in range(2):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    assert type(model["over"]) is not nn.Linear
    assert not hasattr(model["sparse"], "qconfig")
    test_torchrecs_quantize_embeddings(model)


def test_the_way_that_the_message_names() -> None:
    """A torchrec collection with the state dict of a tiered one."""
    import torchrec
    from torchrec.inference.modules import quantize_inference_model

    ours = MAKERS["bag collection"]()
    config = torchrec.EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t", feature_names=["f"])
    theirs = torchrec.EmbeddingBagCollection([config], device=torch.device("cpu"))
    theirs.load_state_dict(ours.state_dict())
    found = quantize_inference_model(nn.ModuleDict({"sparse": theirs}))["sparse"]
    batch = (["f"], torch.tensor([1, 2, 8]), torch.tensor([2, 1]))
    expected = ours(KeyedJaggedTensor.from_lengths_sync(*batch)).values()
    keyed = torchrec.KeyedJaggedTensor.from_lengths_sync(*batch)
    torch.testing.assert_close(found(keyed).values(), expected.detach(), atol=0.01, rtol=0.05)
