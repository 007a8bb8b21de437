"""Batches that cannot be prefetched: their forward calls look up on demand, and a warning says so once."""

from __future__ import annotations

import logging
from weakref import WeakSet

from torch import nn

from tierstore.errors import TierStoreError
from tierstore.pipeline.learning import Call

logger = logging.getLogger("tierstore")

WRONG_BATCH = (TierStoreError, LookupError, AttributeError, TypeError, ValueError, RuntimeError)
"""What a batch of another structure, or wrong ids, may raise. Forward calls raise what else goes wrong."""

_warned: WeakSet[nn.Module] = WeakSet()

_GIVEN = (
    "%s (tables %s): its function in prefetch(..., inputs=...) has failed for a batch, or has returned what "
    "cannot be looked up (%s: %s), so the batch is not prefetched; let the function return the arguments of "
    "the module's forward call for every batch. (said once)"
)
_LEARNED = (
    "%s (tables %s): a batch has another structure than the first one (%s: %s), so it is not prefetched; "
    "give batches of one structure, or prefetch(..., inputs={module: function of the batch}). (said once)"
)


def say_why(call: Call, error: Exception, has_arguments: bool) -> None:
    """Log why a batch is not prefetched for ``call``: as a warning, unless the forward call raises the same.
    ``has_arguments``: whether the call's arguments were found in the batch."""
    if (has_arguments and not call.is_given) or call.module in _warned:
        logger.debug("no prefetch for a batch: %s", error)
        return
    _warned.add(call.module)
    message = _GIVEN if call.is_given else _LEARNED
    tables = ", ".join(call.module.table_names())
    logger.warning(message, type(call.module).__name__, tables, type(error).__name__, error)
