"""What a plan is like, as a dictionary for JSON: fills, seconds, reasons, and what is missing."""

from __future__ import annotations

import math
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
    found, topology = solution.prediction, solution.topology
    binding, place = found.slowest()
    ahead = np.bincount(solution.caches.rank, solution.caches.read_ahead_bytes(), topology.world_size)
    entries = [
        {
            **{name: value for name, value in vars(table).items() if name != "predicted_hit_rate"},
            "sharding_type": table.sharding_type.value,
            "shards": [vars(shard) for shard in table.shards],
            "predicted_hit_rate": table.predicted_hit_rate,
            **_reason(solution, item, shards),
        }
        for item, table, shards in zip(solution.placed, tables, solution.shards(), strict=True)
    ]
    return {
        "feasible": not solution.caches.missing,
        "binding": binding,
        "binding_detail": f"{place} sets the step with its {binding}",
        "missing_bytes": 0,
        "plan_seconds": 0.0,
        "predicted_step_s": found.step,
        "batch_size_per_rank": solution.work.batch_size,
        "assumed_rates": list(topology.assumed),
        "world_size": topology.world_size,
        "ranks_per_host": topology.ranks_per_host,
        "device": topology.device,
        "tables": entries,
        "ranks": [
            {
                **{"rank": r, "host": topology.host_of(r)},
                **_fill("hbm", found.hbm[r], topology.hbm_per_rank),
                "read_ahead_bytes": int(ahead[r]),
                "stage_seconds": dict(zip(RANK_STAGES, found.ranks[r].tolist(), strict=True)),
            }
            for r in range(topology.world_size)
        ],
        "hosts": [
            {
                "host": h,
                **_fill("host_memory", found.host_memory[h], topology.host_memory_per_host),
                **_fill("ssd", found.ssd[h], topology.ssd_per_host),
                "stage_seconds": {"ssd": float(found.ssd_s[h])},
            }
            for h in range(topology.hosts)
        ],
        "what_would_help": [],
        "helps_by_planning_again": False,
    }


def _fill(name: str, used: float, size: int) -> dict[str, float]:
    return {f"{name}_bytes": int(used), f"{name}_fill": float(used / max(1, size))}


def shortage(solution: Solution, lack: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of a report that say what is short and what to do.

    ``lack``: bytes per rank or host that would be enough, by resource.
    """
    topology = solution.topology
    kinds = {
        name: ("rank", topology.world_size) if name == "hbm" else ("host", topology.hosts) for name in FIELDS
    }
    places: dict[str, dict[int, int]] = {}
    for name, size in lack.items():
        missing = {place: n for (kind, place), n in solution.caches.missing.items() if kind == name}
        worst = max(missing, key=lambda place: missing[place], default=0)
        places[name] = {place: min(n, size) for place, n in missing.items()} | {worst: size}
    totals = {name: sum(here.values()) for name, here in places.items()}
    sizes = {name: getattr(topology, FIELDS[name]) * kinds[name][1] for name in totals}
    binding = max(totals, key=lambda name: totals[name] / max(1, sizes[name]))
    (kind, count), here = kinds[binding], places[binding]
    worst = max(here, key=lambda place: here[place])
    adding = " and ".join(
        f"{at_least(size)} of {name.replace('_', ' ')} per {kinds[name][0]}"
        for name, size in sorted(lack.items(), key=lambda item: item[0] != binding)
    )
    return {
        "binding": binding,
        "missing_bytes": totals[binding],
        "missing": totals,
        "to_add": {FIELDS[name]: size for name, size in lack.items()},
        "binding_detail": f"{len(here)} of {count} {kind}s lack it, most of all {kind} {worst}: "
        f"{at_least(here[worst])}",
        "what_to_change": f"add {adding}, or {_otherwise(solution)[binding]}",
    }


def _otherwise(solution: Solution) -> dict[str, str]:
    """Return what else helps where a resource is short, by resource."""
    work, host_memory = solution.work, "give hosts an ssd for the rows that do not fit"
    if solution.topology.ssd_per_host:
        host_memory = (
            f"lower batch_size ({work.batch_size}): rows of batches on their way are held there, and "
            f"so is the store's index, {INDEX_BYTES_PER_ROW} bytes per row"
        )
    return {
        "hbm": f"lower batch_size ({work.batch_size}) or depth ({work.depth}): the rows of {work.depth + 1} "
        "batches must fit",
        "host_memory": host_memory,
        "ssd": "as much host memory: tables held in memory take no ssd",
    }


def at_least(size: int) -> str:
    """Return ``size`` bytes for people, rounded up: with so many it fits."""
    text, more = format_bytes(size), float(size)
    while parse_bytes(text) < size:
        more *= 1.0002
        text = format_bytes(math.ceil(more))
    return text


def _reason(solution: Solution, item: Placed, shards: slice) -> dict[str, Any]:
    """Return a table's tiers, and what more or less of a tier would mean for it."""
    cost, caches, step = item.option.cost, solution.caches, solution.prediction.step
    if item.option.kind is ShardingType.DATA_PARALLEL:
        replica = format_bytes(cost.fixed_hbm)
        return {"tiers": ["hbm"], "why": f"a replica of {replica} per rank needs no exchange of ids and rows"}
    hbm, memory = caches.hbm_rows[shards], caches.memory_rows[shards]
    stored, hosts = memory < cost.rows, caches.rank[shards] // solution.topology.ranks_per_host
    on_link, on_ssd = (np.interp(rows, cost.curve.rows, cost.curve.misses) for rows in (hbm, memory))
    # Each shard is on a rank of its own; drives are those of the host, for all of its shards.
    link, ssd = cost.unique * cost.link_s, cost.unique * cost.ssd_s
    seconds = {
        "one_tier_lower_link_s": link * float(cost.curve.at(cost.floor) - on_link.min()),
        "all_in_hbm_link_s": -link * float(on_link.max()),
        "all_in_memory_ssd_s": -ssd * float(np.bincount(hosts, on_ssd * stored).max()),
        "without_host_memory_ssd_s": ssd * float(np.bincount(hosts, on_link - on_ssd).max()),
    }
    lower, all_hbm, no_ssd, no_host = (
        f"{s * 1e3:+.3g} ms ({abs(s) / step:.1%} of the step)" for s in seconds.values()
    )
    in_hbm = format_bytes(int(((cost.rows - hbm) * cost.slot_bytes).sum()))
    more = int(((cost.rows - memory) * cost.slot_bytes - stored * cost.index_bytes).sum())
    in_memory = f"{format_bytes(more)} {'more' if more > 0 else 'as well'}"
    reads, unique = float((on_ssd * stored).mean()), cost.unique * item.option.row_cuts
    parts = {
        f"all in hbm: {in_hbm} more for {all_hbm} link time": (hbm < cost.rows).any(),
        f"all in memory: {in_memory} for {no_ssd} ssd time": stored.any(),
        f"without its hbm: {lower} link time": seconds["one_tier_lower_link_s"] > 0,
        f"without its host memory: {no_host} ssd time": seconds["without_host_memory_ssd_s"] > 0,
        f"{reads:.1%} of its {unique:,.0f} unique rows per step are read from ssd": stored.any(),
    }
    return {
        "tiers": ["hbm"] + ["uvm"] * bool((memory > hbm + 1).any()) + ["ssd"] * bool(stored.any()),
        "predicted_memory_hit_rate": 1 - float(on_ssd.mean()),
        **seconds,
        "why": "; ".join(part for part, holds in parts.items() if holds) or "every row is in hbm",
    }
