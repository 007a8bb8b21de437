"""torchrec's settings of what ranks send, as tierstore's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
from torchrec.distributed.types import CommOp

from tierstore.errors import ConfigError
from tierstore.sharding import CommsConfig

if TYPE_CHECKING:
    import torch

_PRECISIONS = ("fp32", "fp16", "bf16")
_OPS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)


class QCommsRegistry(dict[str, CommsConfig]):
    """What :func:`get_qcomm_codecs_registry` returns: ``comms`` by the names of torchrec's exchanges."""

    def __init__(self, comms: CommsConfig) -> None:
        super().__init__({op.name: comms for op in _OPS})
        self.comms = comms


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Sequence[CommOp] | None = None,
    device: torch.device | None = None,
) -> QCommsRegistry | None:
    """Return the registry of a QCommsConfig for a sharder; None where everything is float32.

    ``device`` does not matter: gloo takes bf16 and fp16, too. Raises ConfigError for other precisions, for
    scales of the loss and for some of the exchanges alone.
    """
    if comm_ops is not None and set(comm_ops) != set(_OPS):
        raise ConfigError(
            "comm_ops names some exchanges: all of a collection have one precision; leave it out"
        )
    for name in ("forward_loss_scale", "backward_loss_scale"):
        if getattr(qcomms_config, name) not in (None, 1.0):
            raise ConfigError(
                f"{name} is {getattr(qcomms_config, name)}: gradients are sent unscaled; leave it out"
            )
    found: dict[str, Any] = {}
    for name in ("forward_precision", "backward_precision"):
        precision = str(getattr(qcomms_config, name))
        if precision not in _PRECISIONS:
            raise ConfigError(f"{name} is {precision}; use one of CommType.FP32, FP16 and BF16")
        found[name] = precision
    comms = CommsConfig(**found)
    return None if comms == CommsConfig() else QCommsRegistry(comms)


def comms_of(registry: object) -> CommsConfig | None:
    """Return what a sharder's registry says; None for no registry. Raises ConfigError for other codecs."""
    if registry is None:
        return None
    if not isinstance(registry, QCommsRegistry):
        raise ConfigError(
            "qcomm_codecs_registry is not of tierstore.torchrec.distributed.fbgemm_qcomm_codec."
            "get_qcomm_codecs_registry(); ranks exchange rows in FP32, FP16 or BF16, so use that function"
        )
    return registry.comms
