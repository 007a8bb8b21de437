"""What hooks share is compiled for compiled code without an entry from Python, and Python may call it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numba import njit

from cache_policies.inner import called, inlined


@pytest.mark.parametrize("decorator", [called, inlined])
def test_each_caller_has_what_it_needs(decorator: Callable[..., Any]) -> None:
    @decorator
    def more(number):
        return number + 1

    @njit
    def caller(number):
        return more(number) + more(2.5)

    assert caller(1) == 5.5
    assert not more.signatures, "compiled for callers from Python, which there are none of"
    assert more(1) == 2
    assert len(more.signatures) == 1
