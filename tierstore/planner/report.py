"""What a plan is like, as a dictionary for JSON: fills, seconds, reasons, and what would help most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tierstore.config import format_bytes, parse_bytes
from tierstore.placement import ShardingType, TablePlacement
from tierstore.planner.costs import INDEX_BYTES_PER_ROW, RANK_STAGES
from tierstore.planner.options import Placed
from tierstore.planner.solver import Solution
from tierstore.planner.what_if import FIELDS


def report_of(solution: Solution, tables: Sequence[TablePlacement]) -> dict[str, Any]:
    """Return the dictionary of ``tierstore plan --json``; docs/planner.md explains its keys.

    The planner fills in ``plan_seconds`` and what would help.
    """
    binding, place = solution.prediction.slowest()
    return {
        "feasible": not solution.caches.missing,
        "binding": binding,
        "binding_detail": f"{place} sets the step with its {binding}",
        "missing_bytes": 0,
        "plan_seconds": 0.0,
        "predicted_step_s": solution.prediction.step,
        "batch_size_per_rank": solution.work.batch_size,
        "assumed_rates": list(solution.topology.assumed),
        "world_size": solution.topology.world_size,
        "ranks_per_host": solution.topology.ranks_per_host,
        "device": solution.topology.device,
        "tables": [
            {
                "name": table.name,
                "module": table.module,
                "num_embeddings": table.num_embeddings,
                "embedding_dim": table.embedding_dim,
                "sharding_type": table.sharding_type.value,
                "shards": [vars(shard) for shard in table.shards],
                "predicted_hit_rate": table.predicted_hit_rate,
                **reason,
            }
            for table, reason in zip(tables, reasons(solution), strict=True)
        ],
        "ranks": _ranks(solution),
        "hosts": _hosts(solution),
        "what_would_help": [],
        "helps_by_planning_again": False,
    }


def shortage(solution: Solution, lack: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of a report that say what is short and what to do.

    ``lack``: bytes per rank or host that would be enough, by resource.
    """
    topology = solution.topology
    places: dict[str, dict[int, int]] = defaultdict(dict)
    for (name, place), size in solution.caches.missing.items():
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
    """Return ``size`` bytes for people, rounded up: with so many it fits."""
    text, more = format_bytes(size), float(size)
    while parse_bytes(text) < size:
        more *= 1.0002
        text = format_bytes(math.ceil(more))
    return text


def _remedy(binding: str, lack: Mapping[str, int], solution: Solution) -> str:
    """Return what to change where a rank or host lacks so many bytes of each resource."""
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
            "stage_seconds": {"ssd": float(prediction.ssd_s[h])},
        }
        for h in range(topology.hosts)
    ]


def reasons(solution: Solution) -> list[dict[str, Any]]:
    """Return for each table its tiers, and what the neighbouring tiers would mean for it."""
    result, first = [], 0
    for item in solution.placed:
        shards = slice(first, first + len(item.ranks))
        first += len(item.ranks)
        result.append(_reason(solution, item, shards))
    return result


def _reason(solution: Solution, item: Placed, shards: slice) -> dict[str, Any]:
    cost, caches, step = item.option.cost, solution.caches, solution.prediction.step
    if item.option.kind is ShardingType.DATA_PARALLEL:
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
        reads, unique = float((on_ssd * stored).mean()), cost.unique * item.option.row_cuts
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
