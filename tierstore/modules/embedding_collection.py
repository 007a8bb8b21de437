"""EmbeddingCollection: the rows of many features one by one, from tables in tiers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.types import Device

from tierstore.config import TierConfig
from tierstore.modules.collection import Collection, check_bounds
from tierstore.modules.compiling import compiled_as
from tierstore.modules.configs import EmbeddingConfig
from tierstore.modules.features import Features
from tierstore.modules.jagged_rows import JaggedRows
from tierstore.modules.local_lookups import LocalRows
from tierstore.modules.tables import Opening, SharedEngine, is_meta, open_tables
from tierstore.modules.traced import bags_of_keys, jagged_of, traced_rows
from tierstore.optim import NOT_GIVEN
from tierstore.optim.tables import Optimizers
from tierstore.sparse import JaggedTensor, as_keyed_jagged_tensor


class EmbeddingCollection(Collection):
    """KeyedJaggedTensor → dict of JaggedTensors: torchrec's EmbeddingCollection, with tables in tiers.

    The keys of the output are the features in the order of the configuration, ``feature@table`` if several
    tables have it. State dicts have ``embeddings.<table>.weight``. The backward pass applies ``optimizer`` to
    the rows.

    Args:
        tables: EmbeddingConfigs, ours or torchrec's; dims may differ.
        device: where ``hbm`` is, and outputs are: the CPU or a GPU; None: as ``config`` says. "meta": a
            description without rows, to be sharded, or to be given rows by ``to_empty(device=)``.
        need_indices: the ids are the ``weights()`` of the JaggedTensors.
        use_gather_select, use_gather_select_per_sharding: accepted, without effect.
        config, optimizer, seed: as for EmbeddingBagCollection.
    """

    views_name = "embeddings"
    lookups: LocalRows

    def __init__(
        self,
        tables: Sequence[object],
        device: Device = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: object = None,
        *,
        config: TierConfig | None = None,
        optimizer: Optimizers = NOT_GIVEN,
        seed: int = 0,
        _shared: SharedEngine | None = None,
    ) -> None:
        features = Features(tables)
        on_meta = is_meta(device)
        place = None if on_meta else device
        opening = Opening(config, optimizer, seed, _shared, place, on_meta, self.opens_late)
        opened = open_tables(features.tables(), opening)
        check_bounds(features, opened)
        super().__init__(opened, optimizer, features, LocalRows(features, opened))
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables."""
        return self.configs

    def need_indices(self) -> bool:
        """Return whether the ids are returned too."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the dim of all tables; -1 if they differ."""
        return self.features.common_dim()

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return for every table the names of its features in the output."""
        return self.features.outputs_by_table()

    def _traced(self, features: object) -> dict[str, JaggedTensor]:
        keyed, own = as_keyed_jagged_tensor(features), self.features
        bags = bags_of_keys(keyed)
        if bags is None:
            return NotImplemented
        keys, known = own.keys_of(keyed), keyed.length_per_key_or_none()
        counts = None if known is None else [known[key] for key in keys]
        rows, ids = traced_rows(self, jagged_of(keyed), counts, own.dims, self._need_indices)
        lengths = keyed.lengths().view(-1, bags)
        return {
            feature.output: JaggedTensor(
                values,
                ids[number].to(values.device) if self._need_indices else None,
                lengths[key].to(values.device),
            )
            for number, (feature, key, values) in enumerate(zip(own.all, keys, rows, strict=True))
        }

    def ids_by_feature(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> list[Tensor]:
        (keyed,) = self.forward_arguments(ids, lengths, offsets, keys)
        return [keyed[feature.name].values().clone() for feature in self.features.all]

    @compiled_as(_traced)
    def forward(self, features: object) -> dict[str, JaggedTensor]:
        """Return for every feature its rows, (ids, dim) float32, with the lengths of its bags.

        Args:
            features: a KeyedJaggedTensor, ours or torchrec's, with all features; other keys are ignored.
        """
        keyed = as_keyed_jagged_tensor(features)
        rows = self.lookups.rows(self, keyed)
        return JaggedRows(self.features, keyed, rows, self.engine.device_name, self._need_indices).by_output()
