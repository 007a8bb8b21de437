"""Ranks whose tables are on GPUs: which GPU a rank takes, and what all ranks must have for it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tierstore.config import TierConfig
from tierstore.errors import ConfigError, GpuError
from tierstore.sharding.env import ShardingEnv


def on_own_gpu(config: TierConfig) -> TierConfig:
    """Return the configuration of this rank: ``device="cuda"`` becomes the GPU with the number that torchrun
    gave the rank on its host (LOCAL_RANK), and torch's current GPU where there is no such number."""
    if not config.on_gpu or config.device != "cuda":
        return config
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdecimal():
        return replace(config, device=f"cuda:{int(local)}")
    number = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return replace(config, device=f"cuda:{number}")


def join_gpus(env: ShardingEnv, config: TierConfig) -> None:
    """Prepare the exchange of vectors between the GPUs of all ranks. All ranks call it.

    ``config``: of this rank, with the number of its GPU. Raises on all ranks: ConfigError where some ranks
    are on GPUs and some are not, or if two ranks have one GPU; GpuError without NCCL.
    """
    kind = torch.device(config.device or "cpu").type
    env.check_same({"device (cpu or cuda)": kind})
    if kind == "cpu" or env.world_size == 1:
        return
    _check_own(env, str(config.device))
    with env.shared_errors():
        if not dist.is_nccl_available():
            raise GpuError(
                f"this torch ({torch.__version__}) has no NCCL, by which vectors go from GPU to GPU. Install "
                "torch for CUDA (https://pytorch.org/get-started/locally), or use device='cpu'"
            )
    env.gpu_group("vectors")


def _check_own(env: ShardingEnv, device: str) -> None:
    """Raise ConfigError if two ranks have the same GPU, as far as names of hosts and GPUs show."""
    own = os.uname().nodename, os.environ.get("CUDA_VISIBLE_DEVICES"), device
    users: dict[Any, int] = {}
    for rank, gpu in enumerate(env.gather_objects(own)):
        if gpu in users:
            raise ConfigError(
                f"ranks {users[gpu]} and {rank} would both use {gpu[2]} of host {gpu[0]}; give each rank a "
                "GPU of its own: start the ranks with torchrun, which sets LOCAL_RANK, or give every rank "
                "another TierConfig(device='cuda:N')"
            )
        users[gpu] = rank
