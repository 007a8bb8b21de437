"""torch.compile around tiered modules: their lookups are calls that the compiler does not look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Forward = TypeVar("Forward", bound=Callable[..., Any])


def opaque(forward: Forward) -> Forward:
    """Keep torch.compile out of ``forward``: a compiled model has one graph break there. The compiler is not
    imported where nothing is compiled."""
    hidden = torch._disable_dynamo(forward)

    @functools.wraps(forward)
    def called(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return hidden(*args, **kwargs)
        return forward(*args, **kwargs)

    return called  # type: ignore[return-value]
