"""Cache eviction policies for embedding rows, and what they would miss on a trace. Needs numpy and numba
only.
"""

from cache_policies.policy import UNKNOWN, Policy, PolicyError
from cache_policies.registry import get, names, register

__all__ = ["UNKNOWN", "Policy", "PolicyError", "get", "names", "register"]
