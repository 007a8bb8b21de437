"""What a plan is like, as a dictionary for JSON: fills, seconds, reasons, and what would help most."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.config import format_bytes, parse_bytes
from tierstore.placement import ShardingType, TablePlacement
from tierstore.planner.allocate import Placed
from tierstore.planner.cluster import HOST_STAGES, RANK_STAGES, Cluster
from tierstore.planner.costs import INDEX_BYTES_PER_ROW
from tierstore.planner.prices import price_grid, priced
from tierstore.planner.topology import Topology

if TYPE_CHECKING:
    from tierstore.planner.planner import Solution

_GIB = 1 << 30
FIELDS = {"hbm": "hbm_per_rank", "host_memory": "host_memory_per_host", "ssd": "ssd_per_host"}
"""Fields of Topology by the names of resources."""


def report_of(
    solution: Solution,
    tables: Sequence[TablePlacement],
    started: float,
    lack: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The dictionary of ``tierstore plan --json``; docs/planner.md explains its keys. Planning began at
    ``started`` (perf_counter). ``lack``: bytes per rank or host that the tables lack, by resource."""
    prediction, missing = solution.prediction, solution.caches.missing
    binding, place = prediction.slowest()
    result: dict[str, Any] = {
        "feasible": not missing,
        "binding": binding,
        "binding_detail": f"{place} sets the step with its {binding}",
        "missing_bytes": 0,
        "plan_seconds": 0.0,
        "predicted_step_s": prediction.step,
        "batch_size_per_rank": solution.work.batch_size,
        "assumed_rates": list(solution.topology.assumed),
        "world_size": solution.topology.world_size,
        "ranks_per_host": solution.topology.ranks_per_host,
        "device": solution.topology.device,
        "tables": [],
        "ranks": _ranks(solution),
        "hosts": _hosts(solution),
        "what_would_help": [],
        "helps_by_planning_again": False,
    }
    if missing:
        result |= _shortage(missing, lack or {}, solution)
    whys = reasons(solution)
    for placement, why in zip(tables, whys, strict=True):
        result["tables"].append(
            {
                "name": placement.name,
                "module": placement.module,
                "num_embeddings": placement.num_embeddings,
                "embedding_dim": placement.embedding_dim,
                "sharding_type": placement.sharding_type.value,
                "shards": [vars(shard) for shard in placement.shards],
                "predicted_hit_rate": placement.predicted_hit_rate,
                **why,
            }
        )
    if not missing:
        result["what_would_help"] = what_would_help(solution)
    result["plan_seconds"] = time.perf_counter() - started
    return result


def _shortage(
    missing: Mapping[tuple[str, int], int], lack: Mapping[str, int], solution: Solution
) -> dict[str, Any]:
    """What ``lack`` (bytes per rank or host) is in all, and what to do; ``missing`` says where it lacks."""
    topology = solution.topology
    places: dict[str, dict[int, int]] = defaultdict(dict)
    for (name, place), size in missing.items():
        places[name][place] = min(size, lack.get(name, size))
    for name, size in lack.items():
        here = places[name] or {0: size}
        here[max(here, key=lambda place: here[place])] = size
        places[name] = here
    totals = {name: sum(here.values()) for name, here in places.items()}
    sizes = {
        "hbm": topology.hbm_per_rank * topology.world_size,
        "host_memory": topology.host_memory_per_host * topology.hosts,
        "ssd": topology.ssd_per_host * topology.hosts,
    }
    binding = max(totals, key=lambda name: totals[name] / max(1, sizes[name]))
    worst = max(places[binding], key=lambda place: places[binding][place])
    where, of = ("rank", topology.world_size) if binding == "hbm" else ("host", topology.hosts)
    return {
        "binding": binding,
        "missing_bytes": totals[binding],
        "missing": totals,
        "to_add": {FIELDS[name]: size for name, size in lack.items()},
        "binding_detail": f"{len(places[binding])} of {of} {where}s "
        f"lack it, most of all {where} {worst}: {at_least(places[binding][worst])}",
        "what_to_change": _remedy(binding, lack, solution),
    }


def at_least(size: int) -> str:
    """``size`` bytes for people, rounded up: with so many it fits."""
    text, more = format_bytes(size), float(size)
    while parse_bytes(text) < size:
        more *= 1.0002
        text = format_bytes(math.ceil(more))
    return text


def _remedy(binding: str, lack: Mapping[str, int], solution: Solution) -> str:
    """What to change where a rank or host lacks so many bytes of each resource."""
    topology, work = solution.topology, solution.work
    adding = " and ".join(
        f"{at_least(size)} of {name.replace('_', ' ')} per {'rank' if name == 'hbm' else 'host'}"
        for name, size in sorted(lack.items(), key=lambda item: item[0] != binding)
    )
    if binding == "hbm":
        return (
            f"add {adding}, or lower batch_size ({work.batch_size}) or depth ({work.depth}): "
            f"the rows of {work.depth + 1} batches must fit"
        )
    if binding == "ssd":
        return f"add {adding}, or as much host memory: tables held in memory take no ssd"
    if not topology.ssd_per_host:
        return f"add {adding}, or give hosts an ssd for the rows that do not fit"
    return (
        f"add {adding}, or lower batch_size ({work.batch_size}): rows of batches on "
        f"their way are held there, and so is the store's index, {INDEX_BYTES_PER_ROW} bytes per row"
    )


def _ranks(solution: Solution) -> list[dict[str, Any]]:
    prediction, topology = solution.prediction, solution.topology
    return [
        {
            "rank": r,
            "host": topology.host_of(r),
            "hbm_bytes": int(prediction.hbm[r]),
            "hbm_fill": float(prediction.hbm[r] / topology.hbm_per_rank),
            "stage_seconds": dict(zip(RANK_STAGES, prediction.ranks[r].tolist(), strict=True)),
        }
        for r in range(topology.world_size)
    ]


def _hosts(solution: Solution) -> list[dict[str, Any]]:
    prediction, topology = solution.prediction, solution.topology
    return [
        {
            "host": h,
            "host_memory_bytes": int(prediction.host_memory[h]),
            "host_memory_fill": float(prediction.host_memory[h] / max(1, topology.host_memory_per_host)),
            "ssd_bytes": int(prediction.ssd[h]),
            "ssd_fill": float(prediction.ssd[h] / max(1, topology.ssd_per_host)),
            "stage_seconds": dict(zip(HOST_STAGES, prediction.hosts[h].tolist(), strict=True)),
        }
        for h in range(topology.hosts)
    ]


# Why a table is where it is


def reasons(solution: Solution) -> list[dict[str, Any]]:
    """For each table its tiers, and what the neighbouring tiers would mean for it."""
    result, first = [], 0
    for item in solution.placed:
        shards = slice(first, first + len(item.ranks))
        first += len(item.ranks)
        result.append(_reason(solution, item, shards))
    return result


def _reason(solution: Solution, item: Placed, shards: slice) -> dict[str, Any]:
    cost, caches, step = item.cut.cost, solution.caches, solution.prediction.step
    if item.cut.kind is ShardingType.DATA_PARALLEL:
        size = cost.fixed_hbm
        return {
            "tiers": ["hbm"],
            "why": f"a replica of {format_bytes(size)} per rank needs no exchange of ids and rows",
        }
    hbm, memory = caches.hbm_rows[shards], caches.memory_rows[shards]
    stored = memory < cost.rows
    on_link, on_ssd = (np.interp(rows, cost.curve.rows, cost.curve.misses) for rows in (hbm, memory))
    # Each shard is on a rank of its own; drives are those of the host, for all of its shards.
    higher = cost.unique * cost.link_s * float(on_link.max())
    lower = cost.unique * cost.link_s * float(cost.curve.at(cost.floor) - on_link.min())
    hosts = caches.rank[shards] // solution.topology.ranks_per_host
    no_host = cost.unique * cost.ssd_s * float(np.bincount(hosts, on_link - on_ssd).max())
    no_ssd = cost.unique * cost.ssd_s * float(np.bincount(hosts, on_ssd * stored).max())
    tiers = ["hbm"] + ["uvm"] * bool((memory > hbm + 1).any()) + ["ssd"] * bool(stored.any())
    parts = []
    if (hbm < cost.rows).any():
        more = int(((cost.rows - hbm) * cost.slot_bytes).sum())
        parts.append(f"all in hbm: {format_bytes(more)} more for -{_share(higher, step)} link time")
    if stored.any():
        more = int(((cost.rows - memory) * cost.slot_bytes - stored * cost.index_bytes).sum())
        parts.append(
            f"all in memory: {format_bytes(more)} {'more' if more > 0 else 'as well'} for "
            f"-{_share(no_ssd, step)} ssd time"
        )
    if lower > 0:
        parts.append(f"without its hbm: +{_share(lower, step)} link time")
    if no_host > 0:
        parts.append(f"without its host memory: +{_share(no_host, step)} ssd time")
    if stored.any():
        reads, unique = float((on_ssd * stored).mean()), cost.unique * item.cut.row_cuts
        parts.append(f"{reads:.1%} of its {unique:,.0f} unique rows per step are read from ssd")
    return {
        "tiers": tiers,
        "predicted_memory_hit_rate": 1 - float(on_ssd.mean()),
        "one_tier_lower_link_s": lower,
        "all_in_hbm_link_s": -higher,
        "all_in_memory_ssd_s": -no_ssd,
        "without_host_memory_ssd_s": no_host,
        "why": "; ".join(parts) or "every row is in hbm",
    }


def _share(seconds: float, step: float) -> str:
    return f"{seconds * 1e3:.3g} ms ({seconds / step:.1%} of the step)"


# What would help


_FASTER = {
    "hbm_bw": "twice the HBM bandwidth",
    "index_rows_per_s": "twice the rate of the slot index",
    "intra_host_bw": "twice the bandwidth within a host",
    "inter_host_bw": "twice the bandwidth between hosts",
    "host_link_bw": "twice the bandwidth between host and device",
    "host_memory_bw": "twice the host memory bandwidth",
}
_STAGE_RATES = ("hbm_bw", "index_rows_per_s", "intra_host_bw", "inter_host_bw")


def what_would_help(solution: Solution) -> list[dict[str, Any]]:
    """Changes of the machines by what the step would become with the same cuts and ranks, best first."""
    cluster = Cluster(solution.topology, solution.work)
    grid = price_grid(item.cut.cost for item in solution.placed)
    for item in solution.placed:
        ranks = np.asarray(item.ranks, dtype=np.int64)
        cluster.place(item.cut, priced(item.cut.cost, grid), ranks)
    before, step = _longest(cluster), solution.prediction.step
    result = []
    for text, changes in improvements(solution.topology):
        after = step * _longest(_changed(cluster, solution, changes)) / before
        if after < step * 0.999:
            result.append({"change": text, "step_s": after, "step_change": after / step - 1})
    return sorted(result, key=lambda item: item["step_s"])


def improvements(topology: Topology) -> list[tuple[str, dict[str, Any]]]:
    """(Words, fields of the topology) of what could be better."""
    hbm = max(_GIB, int(topology.hbm_per_rank) // 10 // _GIB * _GIB)
    host = max(_GIB, int(topology.host_memory_per_host) // 4 // _GIB * _GIB)
    drives: dict[str, Any] = {
        name: 2 * getattr(topology, name) for name in ("ssd_read_iops", "ssd_bw", "ssd_write_bw")
    }
    drives["ssd_read_curve"] = [(size, 2 * rate) for size, rate in topology.ssd_read_curve]
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"+{format_bytes(hbm)} HBM per rank", {"hbm_per_rank": topology.hbm_per_rank + hbm}),
        (
            f"+{format_bytes(host)} host memory per host",
            {"host_memory_per_host": topology.host_memory_per_host + host},
        ),
        *((text, {name: 2 * getattr(topology, name)}) for name, text in _FASTER.items()),
    ]
    return (
        [*changes, ("twice the SSD reads and writes per second", drives)]
        if topology.ssd_per_host
        else changes
    )


def _changed(cluster: Cluster, solution: Solution, changes: dict[str, Any]) -> Cluster:
    """``cluster`` with other machines: caches are divided anew, cuts and ranks stay."""
    old, new = solution.topology, replace(solution.topology, **changes)
    slower = {
        name: getattr(old, name) / getattr(new, name)
        for name in (*_STAGE_RATES, "host_link_bw", "ssd_read_iops")
    }
    result = copy.copy(cluster)
    result.topology = new
    result.hbm_size, result.host_size = float(new.hbm_per_rank), float(new.host_memory_per_host)
    result.seconds = cluster.seconds * [slower[name] for name in _STAGE_RATES]
    result.link_s = cluster.link_s * slower["host_link_bw"]
    result.ssd_s = cluster.ssd_s * slower["ssd_read_iops"]
    return result


def _longest(cluster: Cluster) -> float:
    rank, host, *_ = cluster.loads()
    return max(float(rank.max()), float(host.max()), 1e-12)
