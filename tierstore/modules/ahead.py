"""Lookups that were made before their forward call, and how it is recognised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from tierstore import _core
from tierstore.modules.lookup import Lookup

Identity: TypeAlias = tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]
Content: TypeAlias = "tuple[int, ...] | None"


def content_of(tensors: Sequence[Tensor]) -> Content:
    """Return a hash of each of ``tensors``, a lookup's inputs; None where they cannot be compared."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    kept = [tensor.detach().contiguous() for tensor in tensors]
    return tuple(_core.content_hash(tensor.data_ptr(), tensor.nbytes) for tensor in kept)


def _identity(tensors: Sequence[Tensor]) -> Identity | None:
    """Return which memory ``tensors`` are, and how often torch has changed it; None if it does not count.

    The tensors must be kept alive meanwhile, so that their memory is not used for other tensors.
    """
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple((t.data_ptr(), tuple(t.shape), tuple(t.stride()), t._version) for t in tensors)


class Ahead:
    """A lookup made ahead for the forward call with these ``inputs``. ``content``: theirs, from before the
    lookup was made."""

    def __init__(self, inputs: Sequence[Tensor], content: Content, lookup: Lookup | None) -> None:
        self._inputs = inputs
        self.content = content
        self.identity: Identity | None = None
        self.lookup = lookup
        self.error: BaseException | None = None

    @classmethod
    def failed(cls, error: BaseException) -> Ahead:
        """There is no lookup, for this reason, which the forward call has to tell."""
        ahead = cls((), None, None)
        ahead.error = error
        return ahead

    def hand_out(self) -> None:
        """Note the inputs' versions: the user has them from now on, and other versions are other inputs."""
        self.identity = _identity(self._inputs)

    def release(self) -> None:
        if self.lookup is not None:
            self.lookup.release()


def find_ahead(handed_out: Iterable[Ahead], inputs: Sequence[Tensor]) -> Ahead | None:
    """Return the first one that is for a forward call with ``inputs``, or has failed.

    Memory that was changed behind torch's back (``x.data``, ``x.numpy()``) has other content.
    """
    identity = _identity(inputs)
    content: Content = None
    for ahead in handed_out:
        if ahead.error is not None:
            return ahead
        if identity is None or ahead.identity != identity or ahead.content is None:
            continue
        content = content or content_of(inputs)
        if ahead.content == content:
            return ahead
    return None
