"""Compiles what every rank would compile for itself."""

import cache_policies

cache_policies.get("lookahead").compile(8)
