"""torchrec's descriptions of machines: topologies, and what is reserved for other things than tables."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

from torchrec.distributed.planner import storage_reservations
from torchrec.distributed.planner import types as planner_types

from tierstore.errors import ConfigError

_PER_MS = 1000
"""Milliseconds of a second: torchrec's bandwidths are bytes per millisecond."""
_RATES = {
    "hbm_mem_bw": "hbm_bw",
    "ddr_mem_bw": "hbm_bw",
    "ssd_mem_bw": "ssd_bw",
    "hbm_to_ddr_mem_bw": "host_link_bw",
    "intra_host_bw": "intra_host_bw",
    "inter_host_bw": "inter_host_bw",
}
"""Rates of tierstore's topologies by torchrec's names. Rows of ``hbm`` are in main memory without a GPU."""
_OF_THE_OTHER = {"cpu": "hbm_mem_bw", "cuda": "ddr_mem_bw"}
"""The rate that does not matter on a device."""
_NO_EFFECT = ("bwd_compute_multiplier", "weighted_feature_bwd_compute_multiplier", "created_by_factory")
"""Arguments that say how torchrec reckons; tierstore's planner has measured costs in their place."""


class Topology(planner_types.Topology):
    """torchrec's Topology, whose sizes and rates tierstore's planner takes where they are given.

    ``hbm_cap``, ``ddr_cap``, ``ssd_cap``: bytes of ``hbm``, ``uvm`` and ``ssd`` of one rank. What is left out
    comes from the default configuration, or from the collections' own.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float | None = None,
        ddr_mem_bw: float | None = None,
        ssd_mem_bw: float | None = None,
        hbm_to_ddr_mem_bw: float | None = None,
        intra_host_bw: float | None = None,
        inter_host_bw: float | None = None,
        bwd_compute_multiplier: float = 2.0,
        custom_topology_data: object = None,
        weighted_feature_bwd_compute_multiplier: float = 1.0,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: object = None,
        created_by_factory: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _RATES and value is not None}
        refused = {
            "pod_size": pod_size not in (None, 1),
            "custom_topology_data": custom_topology_data is not None,
            "uneven_sharding_perf_multiplier": uneven_sharding_perf_multiplier != 1.0,
            "generalized_comms_bandwidths": generalized_comms_bandwidths is not None,
        }
        for name, is_given in refused.items():
            if is_given:
                raise ConfigError(
                    f"Topology: {name} has no counterpart: hosts are equal, and all ranks too; leave it out"
                )
        if compute_device not in _OF_THE_OTHER:
            raise ConfigError(f'Topology: compute_device is {compute_device!r}; use "cpu" or "cuda"')
        local = local_world_size or world_size
        if world_size % local:
            raise ConfigError(f"Topology: {world_size} ranks, {local} per host: one must divide the other")
        caps = {"hbm_cap": hbm_cap, "ddr_cap": ddr_cap, "ssd_cap": ssd_cap}
        more: dict[str, Any] = {**caps, **given}
        if "created_by_factory" in signature(planner_types.Topology).parameters:
            more["created_by_factory"] = True  # torchrec warns of topologies that no factory of its own made
        super().__init__(world_size, compute_device, local_world_size=local_world_size, **more)
        self.caps = caps
        """Bytes of one rank that the script gives; None for what it leaves out."""
        own = {name: value for name, value in given.items() if name != _OF_THE_OTHER[compute_device]}
        self.rates = {_RATES[name]: value * _PER_MS for name, value in own.items()}
        """Rates of tierstore's topology that the script gives, per second."""


class FixedPercentageStorageReservation(storage_reservations.FixedPercentageStorageReservation):
    """Leaves ``percentage`` (0 to 1) of ``hbm`` to other things than rows."""

    def __init__(self, percentage: float) -> None:
        super().__init__(percentage)
        self.percentage = percentage

    def left_of(self, hbm: int) -> int:
        """Return the bytes of ``hbm`` that rows may take."""
        return int(hbm * (1 - self.percentage))

    def dense_bytes(self, parameter_bytes: int) -> int | None:
        """Return the device memory of dense parameters; None for the planner's own estimate."""
        return None


# torchrec 1.6 has none, and then the mirror has no such name either.
_Absolute: Any = getattr(storage_reservations, "FixedAbsoluteStorageReservation", object)


class FixedAbsoluteStorageReservation(_Absolute):
    """Leaves ``hbm_reserved_bytes`` of ``hbm`` to other things than rows."""

    def __init__(self, hbm_reserved_bytes: int) -> None:
        super().__init__(hbm_reserved_bytes)
        self.hbm_reserved_bytes = hbm_reserved_bytes

    def left_of(self, hbm: int) -> int:
        """Return the bytes of ``hbm`` that rows may take."""
        return hbm - self.hbm_reserved_bytes

    def dense_bytes(self, parameter_bytes: int) -> int | None:
        """Return the device memory of dense parameters; None for the planner's own estimate."""
        return None


class HeuristicalStorageReservation(storage_reservations.HeuristicalStorageReservation):
    """Leaves ``percentage`` of ``hbm`` and, on a GPU, the memory of dense parameters to other things than
    rows: ``dense_tensor_estimate`` bytes, or ``parameter_multiplier`` times theirs."""

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        with warnings.catch_warnings():
            # of estimates that tierstore's planner does not make
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(percentage, parameter_multiplier, dense_tensor_estimate)
        self.percentage, self.parameter_multiplier = percentage, parameter_multiplier
        self.dense_tensor_estimate = dense_tensor_estimate

    def left_of(self, hbm: int) -> int:
        """Return the bytes of ``hbm`` that rows and dense parameters may take."""
        return int(hbm * (1 - self.percentage))

    def dense_bytes(self, parameter_bytes: int) -> int | None:
        """Return the device memory of dense parameters of ``parameter_bytes``."""
        if self.dense_tensor_estimate is not None:
            return self.dense_tensor_estimate
        return int(self.parameter_multiplier * parameter_bytes)


Reservation = (
    FixedPercentageStorageReservation | FixedAbsoluteStorageReservation | HeuristicalStorageReservation
)
