"""Checkpoints of a whole training: rows, dense parameters, optimizers, random states, as one unit."""

from tierstore.checkpoint.training import Restored, read_extra, restore, save

__all__ = ["Restored", "read_extra", "restore", "save"]
