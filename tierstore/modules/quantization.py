"""Refuses quantization that would silently leave tables unquantized."""

from __future__ import annotations

import sys
from typing import NoReturn

from tierstore.errors import ConfigError

_QUANTIZED = {"Embedding", "EmbeddingBag", "EmbeddingCollection", "EmbeddingBagCollection"}
"""Classes of torch and torchrec; a caller who quantizes them expects their counterparts here to be
quantized."""


class NotQuantized:
    """The ``qconfig`` of a module whose rows stay float32: it has none, and quantizing embeddings is an
    error.

    torch.ao.quantization, and torchrec's ``quantize_inference_model`` over it, replace modules of the classes
    in a mapping and pass over all other modules. They ask every module for its own ``qconfig`` first. The
    mapping is ``qconfig_dict`` there; only it tells a module that embeddings are to be quantized.
    """

    def __get__(self, module: object, owner: type) -> NoReturn:
        asked = sys._getframe(1).f_locals
        classes = [key for key in asked.get("qconfig_dict") or () if isinstance(key, type)]
        if module is not None and any(kind.__name__ in _QUANTIZED for kind in classes):
            raise ConfigError(
                f"{asked.get('prefix') or 'the model'} is a {type(module).__name__} of tierstore, whose rows "
                "stay float32: quantize a torchrec or torch module that has its state_dict() instead, or "
                "leave embeddings out of the classes to quantize"
            )
        raise AttributeError("qconfig")
