"""Names of policies. A new policy is one file and one line here."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cache_policies.errors import PolicyError
from cache_policies.policy import Policy

_BUILTIN = {
    "lookahead": "lookahead.Lookahead",
    "lru": "lru.Lru",
    "lfu": "lfu.Lfu",
    "lfu_aged": "lfu_aged.LfuAged",
    "fifo": "fifo.Fifo",
    "clock": "clock.Clock",
    "sieve": "sieve.Sieve",
    "s3_fifo": "s3_fifo.S3Fifo",
    "arc": "arc.Arc",
    "w_tinylfu": "w_tinylfu.WTinyLfu",
    "static_top": "static_top.StaticTop",
    "belady": "belady.Belady",
}
_registered: dict[str, type[Policy]] = {}


def names() -> list[str]:
    """Return the names that ``get`` knows."""
    return [*_BUILTIN, *_registered]


def get(policy: str | Policy | type[Policy]) -> Policy:
    """Return the policy of that name with its default parameters; pass a policy (or its class) through.

    A name is a built-in's, a registered one, or ``module:Class`` of a class in a module of the user's, which
    is looked for in the current folder, too. Raises PolicyError for others.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    if policy in _registered:
        return _registered[policy]()
    if ":" in policy:
        return _of_user(policy)
    if policy not in _BUILTIN:
        raise PolicyError(
            f"unknown policy {policy!r}; known: {', '.join(names())}, or module:Class for one of your own"
        )
    module, name = _BUILTIN[policy].split(".")
    return getattr(importlib.import_module(f"cache_policies.{module}"), name)()


def _of_user(place: str) -> Policy:
    """Return the policy of a class that ``module:Class`` names."""
    module, _, name = place.partition(":")
    if not module or not name.isidentifier():
        raise PolicyError(f"policy {place!r}: write module:Class, such as my_policies:Slru")
    try:
        with _current_folder():
            found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise PolicyError(f"policy {place!r}: {module} cannot be imported: {error}") from error
    except Exception as error:
        raise PolicyError(
            f"policy {place!r}: importing {module} raised {type(error).__name__}: {error}"
        ) from error
    if found is None:
        raise PolicyError(f"policy {place!r}: module {module} has no {name}")
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(f"policy {place!r} is no subclass of cache_policies.Policy; make it one")
    found.check_complete()
    try:
        return found()
    except TypeError as error:
        raise PolicyError(
            f"policy {place!r}: {name}() raised {error}; give every parameter a default"
        ) from None


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules of the current folder be imported, after those that are found elsewhere."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def register(policy: type[Policy]) -> type[Policy]:
    """Make a policy known to ``get`` and the command line by its ``name``; a class decorator."""
    if not policy.name or policy.name in _BUILTIN:
        raise PolicyError(
            f"{policy.__name__}.name = {policy.name!r} is empty or a built-in's; choose another"
        )
    _registered[policy.name] = policy
    return policy
