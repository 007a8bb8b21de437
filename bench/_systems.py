"""The systems that ``tierstore bench baselines`` compares, behind one small class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

import tierstore
from tierstore import EmbeddingBagConfig, TierConfig
from tierstore.cache.machine import check_machine
from tierstore.cache.shares import budget, named_as_options
from tierstore.cache.tiers.sizes import as_policy
from tierstore.data import Batch, Dataset
from tierstore.models import AUC, DLRM, DenseEmbeddingBags, DLRMTrain
from tierstore.models.reference import RowWiseAdagrad
from tierstore.optim import RowWiseAdagrad as FusedRowWiseAdagrad
from tierstore.sparse import KeyedJaggedTensor, KeyedTensor

from ._checks import check_memory, importing

LOWER_LAYERS, UPPER_LAYERS = [128], [128, 64, 1]  # as in tierstore train; the lower one ends with the dim
EPS = 1e-8
_ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Setting:
    """The common setting of all systems. Rows use row-wise Adagrad, the dense part Adagrad."""

    tables: list[EmbeddingBagConfig]
    dense_in_features: int
    lr: float
    seed: int
    hbm: int | str
    path: str | None = None
    policy: str = "lookahead"
    window: int | str = "auto"
    read_ahead: int | str = "auto"
    ssd_dtype: str = "fp32"
    state_dtype: str = "fp32"
    stochastic_rounding: bool = True


def table_configs(dataset: Dataset, dim: int) -> list[EmbeddingBagConfig]:
    """Return a table of embedding dimension ``dim`` per table of ``dataset``."""
    return [
        EmbeddingBagConfig(table.num_embeddings, dim, table.name, feature_names=[table.name])
        for table in dataset.tables
    ]


def table_bytes(tables: Sequence[EmbeddingBagConfig]) -> int:
    """Return the bytes of all rows."""
    row_bytes = [FusedRowWiseAdagrad().row_bytes(table.embedding_dim) for table in tables]
    rows = [table.num_embeddings for table in tables]
    return sum(map(mul, rows, row_bytes))


def tier_bytes(size: str, tables: Sequence[EmbeddingBagConfig], option: str = "--hbm") -> int | str:
    """Return a budget: a size, or a fraction of the bytes of all rows, such as "1/37"; ``option`` is for
    errors."""
    return budget(size, table_bytes(tables), option)


def check_setting(setting: Setting) -> None:
    """Raise ConfigError for tiers that cannot be, before anything is opened."""
    with named_as_options():
        config = tier_config(setting)
        check_machine(config)
    as_policy(config.policy)  # refuses a policy that no training can have


def check_in_memory(tables: Sequence[EmbeddingBagConfig]) -> None:
    """Raise ConfigError unless this process can have the memory of all rows, for systems without tiers."""
    check_memory(table_bytes(tables), "the rows of a system in memory", "--rows, --tables, --max-rows, --dim")


class FbgemmBags(nn.Module):
    """fbgemm-gpu's table-batched embeddings, KeyedJaggedTensor -> KeyedTensor, updated in backward.

    ``location``: the ``EmbeddingLocation`` of the rows, HOST for tables on the CPU; ``more``: what else the
    tables get.
    """

    def __init__(self, setting: Setting, location: str = "HOST", device: str = "cpu", **more: Any) -> None:
        super().__init__()
        with importing("fbgemm-gpu"):
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )

        self._tables = setting.tables
        compute = ComputeDevice.CPU if location == "HOST" else ComputeDevice.CUDA
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (t.num_embeddings, t.embedding_dim, EmbeddingLocation[location], compute)
                for t in setting.tables
            ],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=setting.lr,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
            device=torch.device(device),
            **more,
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    def load_rows(self, table: str, ids: Tensor, weight: Tensor) -> None:
        index = [config.name for config in self._tables].index(table)
        self.bags.split_embedding_weights()[index][ids] = weight

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        names = [config.name for config in self._tables]
        assert features.keys() == names
        pooled = self.bags(features.values(), features.offsets())
        return KeyedTensor(names, [config.embedding_dim for config in self._tables], pooled)


class System:
    """One model in training. ``optimizers`` step after every backward pass; ``ahead`` wraps the batches."""

    def __init__(
        self,
        embeddings: nn.Module,
        setting: Setting,
        sparse_optimizer: bool = False,
        ahead: bool = False,
    ) -> None:
        self.embeddings = embeddings
        torch.manual_seed(setting.seed)  # the same dense weights in every system
        model = DLRM(
            embeddings,
            setting.dense_in_features,
            [*LOWER_LAYERS, setting.tables[0].embedding_dim],
            UPPER_LAYERS,
        )
        self.model = DLRMTrain(model)
        rows = {id(parameter) for parameter in embeddings.parameters()}
        dense = [parameter for parameter in model.parameters() if id(parameter) not in rows]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adagrad(dense, lr=setting.lr)]
        if sparse_optimizer:
            self.optimizers.append(RowWiseAdagrad(embeddings.parameters(), setting.lr, EPS))
        self._ahead = ahead
        self.losses: list[float] = []

    def train(self, batches: list[Batch]) -> None:
        if not self._ahead:
            self.steps(batches)
            return
        ahead: Any = tierstore.prefetch(batches, self.model)
        with closing(ahead):
            self.steps(ahead)

    def steps(self, batches: Iterable[Batch]) -> int:
        """Train on ``batches`` as they come, and return how many examples they have."""
        examples = 0
        self.model.train()
        for batch in batches:
            examples += len(batch)
            loss, _ = self.model(batch)
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.losses.append(loss.item())
        return examples

    def auc(self, batches: Iterable[Batch]) -> float:
        """Return the AUC of the logits, without training."""
        auc = AUC()
        self.model.eval()
        with torch.no_grad():
            for batch in batches:
                _, (_, logits, labels) = self.model(batch)
                auc.update(labels, logits)
        return auc.value()

    def close(self) -> None:
        close: Callable[..., Any] | None = getattr(self.embeddings, "close", None)
        if close is not None:
            close(commit=False)


def _torch_sparse(setting: Setting) -> System:
    bags = DenseEmbeddingBags(setting.tables, sparse=True)
    _load_initial_rows(bags, setting)
    return System(bags, setting, sparse_optimizer=True)


def _torch_dense(setting: Setting) -> System:
    bags = DenseEmbeddingBags(setting.tables, sparse=False)
    _load_initial_rows(bags, setting)
    return System(bags, setting, sparse_optimizer=True)


def _fbgemm(setting: Setting) -> System:
    bags = FbgemmBags(setting)
    _load_initial_rows(bags, setting)
    return System(bags, setting)


def _in_memory(setting: Setting) -> System:
    return System(_collection(setting, TierConfig(hbm="all")), setting)


def tier_config(setting: Setting) -> TierConfig:
    """Return the tiers of the system with tiers."""
    return TierConfig(
        hbm=setting.hbm,
        path=setting.path,
        policy=setting.policy,
        window=setting.window,
        read_ahead=setting.read_ahead,
        ssd_dtype=setting.ssd_dtype,
        state_dtype=setting.state_dtype,
        stochastic_rounding=setting.stochastic_rounding,
    )


def _tiered(setting: Setting) -> System:
    return System(_collection(setting, tier_config(setting)), setting, ahead=True)


def _collection(setting: Setting, config: TierConfig) -> Any:
    return tierstore.EmbeddingBagCollection(
        setting.tables,
        config=config,
        optimizer=FusedRowWiseAdagrad(lr=setting.lr, eps=EPS),
        seed=setting.seed,
    )


def _load_initial_rows(bags: Any, setting: Setting) -> None:
    """Give ``bags`` the rows that tierstore's tables begin with."""
    collection = _collection(setting, TierConfig(hbm="all"))
    try:
        for table in setting.tables:
            for first in range(0, table.num_embeddings, _ROWS_AT_ONCE):
                ids = torch.arange(first, min(first + _ROWS_AT_ONCE, table.num_embeddings))
                bags.load_rows(table.name, ids, collection.rows(ids, table.name))
    finally:
        collection.close(commit=False)


SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "torch-sparse": _torch_sparse,
    "torch-dense": _torch_dense,
    "fbgemm": _fbgemm,
    "in-memory": _in_memory,
    "tiered": _tiered,
}
"""torch-*: nn.EmbeddingBag with sparse or dense gradients; fbgemm: its TBE; the last two systems:
tierstore."""
