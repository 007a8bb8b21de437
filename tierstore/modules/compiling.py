"""torch.compile and torch.fx around tiered modules: their lookups are calls that neither looks into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx import Proxy

Forward = TypeVar("Forward", bound=Callable[..., Any])


def opaque(forward: Forward) -> Forward:
    """Keep torch.compile out of ``forward``: a compiled model has one graph break there. The compiler is not
    imported where nothing is compiled. A model that torch.fx traces has one call of the module there."""
    hidden = torch._disable_dynamo(forward)

    @functools.wraps(forward)
    def called(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return hidden(*args, **kwargs)
        given = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
        if isinstance(given, Proxy):
            path = given.tracer.path_of_module(args[0])  # type: ignore[attr-defined]
            return given.tracer.create_proxy("call_module", path, args[1:], kwargs)
        return forward(*args, **kwargs)

    return called  # type: ignore[return-value]
