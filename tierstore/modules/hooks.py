"""Hooks of a module that is replaced by another."""

from __future__ import annotations

from torch import nn

_CARRIED = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the forward and backward hooks of ``old`` to ``new``, its replacement; the hooks' handles still
    remove them."""
    for name in _CARRIED:
        setattr(new, name, getattr(old, name))
