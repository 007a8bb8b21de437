"""Which parts of the kernels the GPUs of a process load."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from unittest import mock

from tierstore.cache.device import ComputedRows
from tierstore.cuda.compute import parts_of
from tierstore.cuda.cubins import Part
from tierstore.cuda.kernels import Kernels
from tierstore.cuda.rows import ANY_LAYOUT
from tierstore.optim import SGD


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


def parts_of_tables(rows: Collection[ComputedRows]) -> list[Part]:
    """Return the parts that tables of these rows load: when they are opened, and later for gradients.

    Gradients are summed by a step of SGD on rows of their own, of the table's dtype or of float32, where
    their norm is clipped or a hook wants them.
    """
    step = SGD(lr=1.0).step_args().kind
    sums = [(dim, dtype, step) for dim, weights, _ in rows for dtype in (weights, "fp32")]
    return [ANY_LAYOUT, *parts_of([*rows, *dict.fromkeys(sums)])]
