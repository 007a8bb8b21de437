"""What a plan is like, as a dictionary for JSON: fills, seconds, reasons, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tierstore.config import format_bytes
from tierstore.placement import ShardingPlan, ShardingType
from tierstore.planner.costs import COMPACT_INDEX_BYTES_PER_ROW, INDEX_BYTES_PER_ROW, RANK_STAGES
from tierstore.planner.options import Placed
from tierstore.planner.solver import Solution
from tierstore.planner.what_if import FIELDS

_OTHERWISE = {
    "hbm": "lower batch_size or depth: the rows of depth + 1 batches must fit",
    "host_memory": "lower batch_size: rows of batches on their way are held there, and so is the store's "
    f"index, {COMPACT_INDEX_BYTES_PER_ROW} to {INDEX_BYTES_PER_ROW} bytes per row",
    "no_ssd": "give hosts an ssd for the rows that do not fit",
    "ssd": "as much host memory: tables held in memory take no ssd",
}
"""What else helps, by what is short."""
_ROUNDING = 1e-9
"""Shares of a step up to which seconds are what arithmetic leaves of zero."""


def report_of(solution: Solution, plan: ShardingPlan) -> dict[str, Any]:
    """Return the dictionary of ``tierstore plan --json``; docs/planner.md explains its keys.

    The planner fills in ``plan_seconds`` and what would help.
    """
    found, topology = solution.prediction, solution.problem.topology
    binding, place = found.slowest()
    ahead = np.bincount(solution.caches.rank, solution.caches.read_ahead_bytes(), topology.world_size)
    speeds = [topology.intra_host_bw, topology.inter_host_bw]  # of what a rank receives from others
    values = plan.to_dict()
    for entry, item, shards in zip(values["tables"], solution.placed, solution.shards(), strict=True):
        entry |= _reason(solution, item, shards) | {"predicted": _predicted(solution, shards)}
    return {
        "feasible": not solution.caches.missing,
        "binding": binding,
        "binding_detail": f"{place} sets the step with its {binding}",
        "missing_bytes": 0,
        "plan_seconds": 0.0,
        "predicted_step_s": found.step,
        "batch_size_per_rank": solution.problem.work.batch_size,
        "assumed_rates": list(topology.assumed),
        **values,
        "ranks": [
            {
                **{"rank": r, "host": r // topology.ranks_per_host},
                **_fill("hbm", found.hbm[r], topology.hbm_per_rank),
                "read_ahead_bytes": int(ahead[r]),
                "exchange_bytes": int(found.ranks[r, 2:4] @ speeds),
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


def _predicted(solution: Solution, shards: slice) -> list[dict[str, float]]:
    """Return by shard the distinct rows of a step, and how many of them device memory, and device and host
    memory together, miss. Of replicas no rows are counted, since they miss nothing."""
    unique = solution.caches.field("unique")[shards]
    missed = [unique * share[shards] for share in solution.missed]
    names = "unique_rows", "hbm_misses", "memory_misses"
    return [dict(zip(names, values, strict=True)) for values in np.column_stack([unique, *missed]).tolist()]


def _fill(name: str, used: float, size: int) -> dict[str, float]:
    return {f"{name}_bytes": int(used), f"{name}_fill": float(used / max(1, size))}


def shortage(solution: Solution, lack: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of a report that say what is short and what to do.

    ``lack``: bytes per rank or host that would be enough, by resource.
    """
    topology, totals, shares, places = solution.problem.topology, {}, {}, {}
    for name, size in lack.items():
        kind, count = ("rank", topology.world_size) if name == "hbm" else ("host", topology.hosts)
        short = sorted(
            min(n, size) for (resource, _), n in solution.caches.missing.items() if resource == name
        )
        totals[name] = size + sum(short[:-1])
        shares[name] = totals[name] / max(1, getattr(topology, FIELDS[name]) * count)
        places[name] = kind, f"{max(1, len(short))} of {count} {kind}s lack it, at most {at_least(size)} each"
    binding = max(shares, key=lambda name: shares[name])
    adding = " and ".join(
        f"{at_least(lack[name])} of {name.replace('_', ' ')} per {places[name][0]}"
        for name in sorted(lack, key=lambda name: name != binding)
    )
    otherwise = _OTHERWISE["no_ssd" if binding == "host_memory" and not topology.ssd_per_host else binding]
    return {
        "binding": binding,
        "missing_bytes": totals[binding],
        "missing": totals,
        "to_add": {FIELDS[name]: size for name, size in lack.items()},
        "binding_detail": places[binding][1],
        "what_to_change": f"add {adding}, or {otherwise}",
    }


def at_least(size: int) -> str:
    """Return ``size`` bytes for people, who get four digits, rounded up: with so many it fits."""
    return format_bytes(math.ceil(size * 1.0006))


def _reason(solution: Solution, item: Placed, shards: slice) -> dict[str, Any]:
    """Return a table's tiers, and what more or less of a tier would mean for it."""
    cost, caches, step = item.option.cost, solution.caches, solution.prediction.step
    if item.option.kind is ShardingType.DATA_PARALLEL:
        replica = format_bytes(int(caches.hbm_bytes()[shards][0]))
        return {"tiers": ["hbm"], "why": f"a replica of {replica} per rank needs no exchange of ids and rows"}
    hbm, memory = caches.hbm_rows[shards], caches.memory_rows[shards]
    on_link, on_ssd = (share[shards] for share in solution.missed)
    stored, hosts = memory < cost.rows, caches.rank[shards] // solution.problem.topology.ranks_per_host
    # Each shard is on a rank of its own; drives are those of the host, for all of its shards.
    link, ssd = cost.unique * cost.link_s, cost.unique * cost.ssd_s
    more_hbm = format_bytes(int(((cost.rows - hbm) * cost.slot_bytes).sum()))
    size = int(((cost.rows - memory) * cost.slot_bytes - stored * cost.index_bytes).sum())
    more_memory = f"{format_bytes(size)} {'more' if size > 0 else 'as well'}"
    more = -link * on_link.max() - cost.policy_s * (hbm < cost.rows).any()
    less_hbm = link * (cost.curve.at(cost.hbm_floor) - on_link.min())
    less_memory = ssd * np.bincount(hosts, on_link - on_ssd).max()
    # The names say whose time a change takes, and the words what the change is.
    changes = {
        "all_in_hbm_link_s": (f"all in hbm: {more_hbm} more", more),
        "all_in_memory_ssd_s": (f"all in memory: {more_memory}", -ssd * np.bincount(hosts, on_ssd).max()),
        "one_tier_lower_link_s": ("without its hbm", less_hbm),
        "without_host_memory_ssd_s": ("without its host memory", less_memory),
    }
    why = [
        f"{what}: {s * 1e3:+.3g} ms of {name.split('_')[-2]} time ({abs(s) / step:.1%} of the step)"
        for name, (what, s) in changes.items()
        if abs(s) > _ROUNDING * step
    ]
    if stored.any():
        unique = cost.unique * item.option.row_cuts
        why.append(f"{on_ssd.mean():.1%} of its {unique:,.0f} unique rows per step are read from ssd")
    return {
        "tiers": ["hbm"] + ["uvm"] * bool((memory > hbm + 1).any()) + ["ssd"] * bool(stored.any()),
        **{name: float(s) for name, (_, s) in changes.items()},
        "why": "; ".join(why) or "every row is in hbm",
    }
