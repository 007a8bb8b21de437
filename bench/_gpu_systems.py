"""The tables that ``tierstore bench gpu`` trains: tierstore's on a GPU, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import tierstore
from tierstore import EmbeddingBagConfig, TierConfig
from tierstore.data import load
from tierstore.models import DenseEmbeddingBags
from tierstore.models.reference import RowWiseAdagrad
from tierstore.sparse import KeyedJaggedTensor, KeyedTensor

from ._gpu_sizes import RATIO, Setting
from ._systems import EPS, FbgemmBags, table_configs
from ._systems import Setting as SystemSetting

LR = 0.02


class Absent(Exception):
    """What a system needs is not installed; the text says so."""


@dataclass
class Tables:
    """``bags``: KeyedJaggedTensor on ``ids_on`` -> KeyedTensor on the GPU. ``optimizers`` update the rows
    that the backward pass does not; ``ahead``: the rows come ahead of their batch."""

    bags: Any
    ids_on: str
    ahead: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def close(self) -> None:
        if self.ahead:
            self.bags.close(commit=False)


class HostBags(nn.Module):
    """``nn.EmbeddingBag`` in the host's memory; the vectors go to the GPU, and their gradients back."""

    def __init__(self, configs: Sequence[EmbeddingBagConfig], device: str) -> None:
        super().__init__()
        self.bags, self._device = DenseEmbeddingBags(configs, sparse=True), device

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.bags.embedding_bag_configs()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = self.bags(features)
        dims = [config.embedding_dim for config in self.embedding_bag_configs()]
        return KeyedTensor(pooled.keys(), dims, pooled.values().to(self._device, non_blocking=True))


def configs_of(setting: Setting) -> list[EmbeddingBagConfig]:
    """Return Criteo's tables; their weights begin with a constant, which takes no time to write."""
    dataset = load("synthetic:criteo", max_rows=setting.sizes.max_rows)
    configs = table_configs(dataset, setting.sizes.dim)
    for config in configs:
        config.init_fn = partial(nn.init.constant_, val=0.01)
    return configs


def budgets(setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the budgets of tierstore's systems: all rows in ``hbm``, or one ``RATIO``-th of them."""
    sizes = setting.sizes
    rows = sum(config.num_embeddings for config in configs_of(setting))
    every = rows * sizes.row_bytes
    return {
        "hbm": {"hbm": "all"},
        "uvm": {"hbm": every // RATIO, "uvm": every + 64 * rows, "ssd": 0},
        "uvm_ssd": {"hbm": every // RATIO, "uvm": every // 10, "ssd": "auto"},
    }


def _tiered(name: str, setting: Setting) -> Tables:
    config = TierConfig(**budgets(setting)[name], overcommit=setting.sizes.host_gib > 0)
    bags = tierstore.EmbeddingBagCollection(
        tables=configs_of(setting), device=setting.device, config=config,
        optimizer=tierstore.optim.RowWiseAdagrad(lr=LR, eps=EPS),
    )  # fmt: skip
    return Tables(bags, "cpu", ahead=True)


def _embedding_bag(setting: Setting) -> Tables:
    bags = DenseEmbeddingBags(configs_of(setting), sparse=True, device=torch.device(setting.device))
    return Tables(bags, setting.device, optimizers=[RowWiseAdagrad(bags.parameters(), LR, EPS)])


def _embedding_bag_host(setting: Setting) -> Tables:
    bags = HostBags(configs_of(setting), setting.device)
    return Tables(bags, "cpu", optimizers=[RowWiseAdagrad(bags.parameters(), LR, EPS)])


def _fbgemm(location: str, setting: Setting) -> Tables:
    """Return fbgemm's TBE: all rows on the GPU, or in managed memory with one ``RATIO``-th of the rows in its
    cache."""
    on_gpu = torch.device(setting.device).type == "cuda"
    try:
        import fbgemm_gpu
    except (ImportError, OSError) as error:
        raise Absent(f"fbgemm_gpu is absent: {error}") from None
    variant = getattr(fbgemm_gpu, "__variant__", "unknown")
    if on_gpu and variant == "cpu":
        raise Absent(f"fbgemm_gpu {fbgemm_gpu.__version__} is here for CPUs alone; its CUDA build is absent")
    more = {"cache_load_factor": 1 / RATIO} if location == "MANAGED_CACHING" else {}
    common = SystemSetting(configs_of(setting), 13, LR, 0, "all")
    return Tables(FbgemmBags(common, location, setting.device, **more), setting.device)


SYSTEMS: dict[str, Callable[[Setting], Tables]] = {
    "hbm": partial(_tiered, "hbm"),
    "uvm": partial(_tiered, "uvm"),
    "uvm_ssd": partial(_tiered, "uvm_ssd"),
    "embedding_bag": _embedding_bag,
    "embedding_bag_host": _embedding_bag_host,
    "fbgemm": partial(_fbgemm, "DEVICE"),
    "fbgemm_uvm": partial(_fbgemm, "MANAGED_CACHING"),
}
