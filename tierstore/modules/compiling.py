"""torch.compile and torch.fx around tiered modules: what a forward call is while a graph is made."""

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
        return _untraced(forward, args, kwargs)

    return called  # type: ignore[return-value]


def compiled_as(traced: Callable[..., Any]) -> Callable[[Forward], Forward]:
    """Let torch.compile and torch.export trace ``traced`` in place of ``forward``, which has the same
    arguments. What ``traced`` returns ``NotImplemented`` for has a graph break, as :func:`opaque` makes."""

    def decorated(forward: Forward) -> Forward:
        hidden = torch._disable_dynamo(forward)

        @functools.wraps(forward)
        def called(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                found = traced(*args, **kwargs)
                return hidden(*args, **kwargs) if found is NotImplemented else found
            return _untraced(forward, args, kwargs)

        return called  # type: ignore[return-value]

    return decorated


def _untraced(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    given = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    if isinstance(given, Proxy):
        path = given.tracer.path_of_module(args[0])  # type: ignore[attr-defined]
        return given.tracer.create_proxy("call_module", path, args[1:], kwargs)
    return forward(*args, **kwargs)
