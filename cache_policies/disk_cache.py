"""Compiled code is kept on disk where that is possible, and compiled anew by each process where it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

_log = logging.getLogger(__name__)


class DiskCache(FunctionCache):
    """numba's on-disk cache, in which damaged files and full disks are no errors."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a damaged file, or a module that this process cannot import
            _log.debug("cached code is not usable and compiled anew: %s", error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _log.debug("compiled code is not cached: %s", error)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile ``function`` at its first call, without the GIL; another process may have done so before."""
    dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher._cache = DiskCache(function)
    except (RuntimeError, OSError):  # numba finds no folder that it may write to
        _warn()
    return dispatcher


@cache
def _warn() -> None:
    """Say once why every process takes so long."""
    _log.warning(
        "no folder for compiled code can be written, so each process compiles for some seconds before it "
        "computes; set NUMBA_CACHE_DIR to a folder that stays (said once)"
    )
