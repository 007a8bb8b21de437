"""torch.compile and torch.fx around tiered modules: what a forward call is while a graph is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling
from torch.fx import Proxy

Forward = TypeVar("Forward", bound=Callable[..., Any])


def compiled_as(traced: Callable[..., object]) -> Callable[[Forward], Forward]:
    """Let torch.compile and torch.export trace ``traced`` in place of ``forward``, which has the same
    arguments. Where ``traced`` returns ``NotImplemented``, a compiled model has one graph break.

    The compiler is not imported where nothing is compiled. A model that torch.fx traces has one call of the
    module there."""

    def decorated(forward: Forward) -> Forward:
        hidden = torch._disable_dynamo(forward)

        @functools.wraps(forward)
        def called(*args: object, **kwargs: object) -> object:
            if is_compiling():
                found = traced(*args, **kwargs)
                return hidden(*args, **kwargs) if found is NotImplemented else found
            given = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
            if isinstance(given, Proxy):
                path = given.tracer.path_of_module(args[0])  # type: ignore[attr-defined]
                return given.tracer.create_proxy("call_module", path, args[1:], kwargs)
            return forward(*args, **kwargs)

        return called  # type: ignore[return-value]

    return decorated


def _not_traced(*args: object, **kwargs: object) -> object:
    return NotImplemented


opaque = compiled_as(_not_traced)
"""Keeps torch.compile out of a forward call: a compiled model always has one graph break there."""
