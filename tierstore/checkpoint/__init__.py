"""Checkpoints of a whole training: rows, dense parameters, optimizers, random states, as one unit.

:mod:`tierstore.checkpoint.dcp` has the same for torch.distributed.checkpoint.
"""

from tierstore.checkpoint.training import Restored, read_extra, restore, save
from tierstore.modules.tables import without_rows

__all__ = ["Restored", "read_extra", "restore", "save", "without_rows"]
