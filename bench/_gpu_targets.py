"""The ratios that ``tierstore bench gpu`` is to show, each of two figures of one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAN_MS, _PLAN_THREADS = 8.0, 16


def targets(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each target with its ratio; None where the run has not measured both of its figures."""

    def figure(part: str, key: str) -> float | None:
        return parts.get(part, {}).get(key)

    def quotient(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    def step(system: str, stage: str) -> float | None:
        return figure(system, f"{stage}.ms_per_step")

    found = {
        "gather_vs_copy": (0.85, figure("kernels", "ratio.gather_vs_copy")),
        "pooled_vs_copy": (0.85, figure("kernels", "ratio.pooled_vs_copy")),
        "rows_both_ways_vs_link": (0.85, figure("link", "ratio.pinned_both_vs_link")),
        "hbm_step_vs_fbgemm": (1.0, quotient(step("fbgemm", "embedding"), step("hbm", "embedding"))),
        "hbm_step_vs_bandwidth": (0.6, quotient(figure("hbm", "bound.ms"), step("hbm", "embedding"))),
        "uvm_vs_hbm": (0.9, quotient(step("hbm", "dlrm"), step("uvm", "dlrm"))),
        "uvm_ssd_vs_hbm": (0.8, quotient(step("hbm", "dlrm"), step("uvm_ssd", "dlrm"))),
        "plan_8_ms_vs_plan": (
            1.0,
            quotient(_PLAN_MS, figure("planning", f"{_PLAN_THREADS}_threads.planned_ms")),
        ),
    }
    if found["hbm_step_vs_fbgemm"][1] is not None:
        del found["hbm_step_vs_bandwidth"]  # it stands for fbgemm where that is absent
    return {
        name: {"ratio": ratio, "target": least, "met": None if ratio is None else ratio >= least}
        for name, (least, ratio) in found.items()
    }


def comparisons(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return steps per second of each system and stage over the steps per second of tierstore with everything
    in ``hbm``."""
    found = {}
    for stage in ("embedding", "dlrm", "dcnv2"):
        key = f"{stage}.ms_per_step"
        base = parts.get("hbm", {}).get(key)
        for name, figures in parts.items():
            if base and name != "hbm" and figures.get(key):
                found[f"ratio.{stage}.{name}_vs_hbm"] = base / figures[key]
    return found
