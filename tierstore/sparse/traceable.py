"""Lets FX trace code that constructs jagged and keyed tensors: a call with proxies is a node of the graph."""

from __future__ import annotations

from typing import Any

from torch.fx import ProxyableClassMeta
from torch.fx._symbolic_trace import is_fx_symbolic_tracing


class Traceable(ProxyableClassMeta):
    """torch's metaclass for this, which does its work (and says so in the log) only while FX traces."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_fx_symbolic_tracing():
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)
