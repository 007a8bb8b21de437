"""What happens to ids that a table does not have, where ``TierConfig.bounds_check`` makes them no error."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tierstore.config import FATAL, WARNING
from tierstore.errors import ConfigError
from tierstore.modules.configs import BaseEmbeddingConfig
from tierstore.sparse import KeyedJaggedTensor

logger = logging.getLogger("tierstore")


@dataclass
class Bounds:
    """Ids of a table with ``rows`` rows. ``mode``: of config.BOUNDS_CHECKS, and not "fatal"."""

    table: str
    rows: int
    mode: str
    warned: bool = False

    def kept(self, ids: Tensor) -> Tensor:
        """Return ``ids``, or a copy in which those that are out of range are 0. The first warns, if asked."""
        outside = (ids < 0) | (ids >= self.rows)
        if not outside.any():
            return ids
        if self.mode == WARNING and not self.warned:
            self.warned = True
            logger.warning(
                "table %r: %d of %d ids are out of range [0, %d), such as %d, and are taken for id 0. "
                "(said once)",
                self.table,
                int(outside.sum()),
                ids.numel(),
                self.rows,
                int(ids[outside][0]),
            )
        return ids.masked_fill(outside, 0)


def bounds_of(table: str, rows: int, mode: str) -> Bounds | None:
    """Return the bounds of a table's ids; None where an id that is out of range is an error."""
    return None if mode == FATAL else Bounds(table, rows, mode)


class KeyBounds:
    """Bounds by key of a KeyedJaggedTensor.

    Raises ConfigError for a key of several tables that do not agree: the ids are the same for all of them.
    """

    def __init__(self, configs: Sequence[BaseEmbeddingConfig], modes: Mapping[str, str]) -> None:
        self._of: dict[str, Bounds] = {}
        users: dict[str, set[tuple[int, str]]] = {}
        for config in configs:
            mode = modes[config.name]
            bounds = bounds_of(config.name, config.num_embeddings, mode)
            for key in config.feature_names:
                of_key = users.setdefault(key, set())
                of_key.add((config.num_embeddings, mode))
                if len(of_key) > 1 and any(other != FATAL for _, other in of_key):
                    raise ConfigError(
                        f"feature {key!r} is looked up in tables of different sizes or bounds checks, so its "
                        'ids cannot be changed for one of them: give these tables bounds_check="fatal"'
                    )
                if bounds is not None:
                    self._of[key] = bounds

    def kept(self, keyed: KeyedJaggedTensor, values: Tensor) -> Tensor:
        """Return the ids of all keys, with those that are out of range as 0."""
        keyed.sync()
        number_of, offsets, result = keyed.index_per_key(), keyed.offset_per_key(), values
        for key, bounds in self._of.items():
            if key in number_of:
                number = number_of[key]
                own = slice(offsets[number], offsets[number + 1])
                changed = bounds.kept(values[own])
                if changed.data_ptr() != values[own].data_ptr():
                    result = values.clone() if result is values else result
                    result[own] = changed
        return result

    def __bool__(self) -> bool:
        return bool(self._of)
