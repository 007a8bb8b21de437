"""Which parts of the kernels the GPUs of a process load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tierstore.cuda.cubins import Part
from tierstore.cuda.kernels import Kernels


@contextmanager
def loaded_parts() -> Iterator[set[Part]]:
    """Yield a set that gets every part that a device loads meanwhile."""
    found: set[Part] = set()
    plain = Kernels._module

    def module(kernels: Kernels, part: Part) -> int:
        found.add(part)
        return plain(kernels, part)

    with mock.patch.object(Kernels, "_module", module):
        yield found
