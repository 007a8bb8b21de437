"""Lookups that were made before their forward call, and how a forward call finds its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from tierstore import _core
from tierstore.modules.parts import Lookup

Identity: TypeAlias = tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]
Content: TypeAlias = "tuple[int, ...] | None"


def content_of(tensors: Sequence[Tensor]) -> Content:
    """Return a hash of each of ``tensors``, a lookup's inputs; None where they cannot be compared. Those on a
    GPU are copied to the host."""
    if any(t.device.type not in ("cpu", "cuda") or t.layout is not torch.strided for t in tensors):
        return None
    kept = [tensor.detach().cpu().contiguous() for tensor in tensors]
    if any(tensor.numel() and not tensor.data_ptr() for tensor in kept):
        return None
    return tuple(_core.content_hash(tensor.data_ptr(), tensor.nbytes) for tensor in kept)


def _identity(tensors: Sequence[Tensor]) -> Identity | None:
    """Return which memory ``tensors`` occupy, and how often torch has changed it; None if torch does not
    count.

    The tensors must be kept alive meanwhile, so that their memory is not used for other tensors. Tensors
    without elements have no memory, and are known by their storage: a rank with an empty batch must find the
    same one of its lookups as the other ranks do.
    """
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple((_memory(t), tuple(t.shape), tuple(t.stride()), t._version) for t in tensors)


def _memory(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.numel() else tensor.untyped_storage()._cdata


class Ahead:
    """A lookup made ahead for the forward call with these ``inputs``. ``content``: the inputs' hashes, from
    before the lookup was made; ``form``: what else the lookup is made of."""

    def __init__(
        self, inputs: Sequence[Tensor], content: Content, lookup: Lookup | None, form: object = None
    ) -> None:
        self.inputs = inputs
        self.content = content
        self.form = form
        self.identity: Identity | None = None
        self.lookup = lookup
        self.error: BaseException | None = None

    @classmethod
    def failed(cls, error: BaseException) -> Ahead:
        """Make an entry without a lookup; the forward call raises ``error``."""
        ahead = cls((), None, None)
        ahead.error = error
        return ahead

    def hand_out(self) -> None:
        """Note the inputs' versions: the user has the inputs from now on, and a changed version is another
        input."""
        self.identity = _identity(self.inputs)

    def release(self) -> None:
        if self.lookup is not None:
            self.lookup.release()


def find_ahead(handed_out: Iterable[Ahead], inputs: Sequence[Tensor], form: object = None) -> Ahead | None:
    """Return the first lookup that is for a forward call with ``inputs`` and ``form``, or has failed.

    Where torch did not see a change of the memory (``x.data``, ``x.numpy()``), the content shows it.
    """
    identity = _identity(inputs)
    content: Content = None
    for ahead in handed_out:
        if ahead.error is not None:
            return ahead
        if identity is None or ahead.identity != identity or ahead.content is None or ahead.form != form:
            continue
        content = content or content_of(inputs)
        if ahead.content == content:
            return ahead
    return None
