"""The native core: see csrc/bindings for what it has; its types are not written down."""

from typing import Any

def __getattr__(name: str) -> Any: ...
