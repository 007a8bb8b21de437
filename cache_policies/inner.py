"""Decorators of functions that compiled code calls: what hooks share, and the steps of the simulator.

numba compiles an entry from Python for each such function, too. The entry unpacks every array of a policy's
state, and takes as long to compile as the function itself. Here compiled code has a twin without an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

#: Options of a function that Python does not call: without an entry it would crash.
NO_ENTRY: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inlined(function: Callable[..., Any]) -> Any:
    """Compile ``function`` into its callers."""
    return _with_twin(function, forceinline=True)


def called(function: Callable[..., Any]) -> Any:
    """Compile ``function``, which is long or rarely needed, beside its callers."""
    return _with_twin(function)


def _with_twin(function: Callable[..., Any], **options: Any) -> Any:
    compiler: Any = njit  # whose types do not know all of its options
    of_python = compiler(function, error_model="numpy", **options)
    twin = compiler(function, error_model="numpy", **options, **NO_ENTRY)
    # By these numba finds what compiled code calls.
    of_python.get_call_template, of_python.get_overload = twin.get_call_template, twin.get_overload
    return of_python
