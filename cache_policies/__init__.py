"""Cache eviction policies for embedding rows, and what they would miss on a trace. Needs numpy and numba
only.
"""

from cache_policies.admission import Admission, get_admission
from cache_policies.check import check
from cache_policies.curves import Point, miss_curves, steady_curve, window_for
from cache_policies.errors import PolicyError
from cache_policies.policy import UNKNOWN, Policy
from cache_policies.prepared import PreparedTrace, prepare, prepare_flat
from cache_policies.registry import get, names, register
from cache_policies.reuse import ReuseCurve, lru_curve
from cache_policies.simulation import Simulation
from cache_policies.simulator import simulate
from cache_policies.windows import automatic_windows

__all__ = [
    "UNKNOWN",
    "Admission",
    "Point",
    "Policy",
    "PolicyError",
    "PreparedTrace",
    "ReuseCurve",
    "Simulation",
    "automatic_windows",
    "check",
    "get",
    "get_admission",
    "lru_curve",
    "miss_curves",
    "names",
    "prepare",
    "prepare_flat",
    "register",
    "simulate",
    "steady_curve",
    "window_for",
]
