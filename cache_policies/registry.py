"""Names of policies. A new policy is one file and one line here."""

from __future__ import annotations

import importlib

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
    """Return the policy of that name with its default parameters; pass a policy (or its class) through."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    if policy in _registered:
        return _registered[policy]()
    if policy not in _BUILTIN:
        raise PolicyError(f"unknown policy {policy!r}; known: {', '.join(names())}")
    module, name = _BUILTIN[policy].split(".")
    return getattr(importlib.import_module(f"cache_policies.{module}"), name)()


def register(policy: type[Policy]) -> type[Policy]:
    """Make a policy known to ``get`` and the command line by its ``name``; a class decorator."""
    if not policy.name or policy.name in _BUILTIN:
        raise PolicyError(
            f"{policy.__name__}.name = {policy.name!r} is empty or a built-in's; choose another"
        )
    _registered[policy.name] = policy
    return policy
