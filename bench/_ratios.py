"""Ratios of the figures of ``tierstore bench store``."""

from __future__ import annotations


def ratios(figures: dict[str, float], engines: list[str]) -> dict[str, float]:
    """Compare each engine with the device, and the first engine with the other engines."""
    result = {}
    for name in engines:
        own = {
            "read_vs_device": figures[f"{name}.read.rows_per_s"] / figures["device.read_iops"],
            "write_vs_device": figures[f"{name}.overwrite.rows_per_s"]
            * figures["row_bytes"]
            / figures["device.write_bytes_per_s"],
            "load_vs_device": figures[f"{name}.load.rows_per_s"]
            * figures["row_bytes"]
            / figures["device.write_bytes_per_s"],
            "window_vs_read": figures[f"{name}.read_window.rows_per_s"] / figures[f"{name}.read.rows_per_s"],
        }
        if f"{name}.read_beside_writes.rows_per_s" in figures:
            own["read_beside_writes"] = (
                figures[f"{name}.read_beside_writes.rows_per_s"] / figures[f"{name}.read.rows_per_s"]
            )
        if f"{name}.read_when_full.rows_per_s" in figures:
            own["read_beside_compaction"] = (
                figures[f"{name}.read_beside_compaction.rows_per_s"]
                / figures[f"{name}.read_when_full.rows_per_s"]
            )
        prefix = "" if name == engines[0] else f"{name}_"
        result |= {f"ratio.{prefix}{key}": value for key, value in own.items()}
    first, *others = engines
    for name in others:
        for kind in ("read", "read_threads"):
            if f"{name}.{kind}.rows_per_s" in figures:
                key = f"ratio.read_vs_{name}" + ("_threads" if kind == "read_threads" else "")
                result[key] = figures[f"{first}.read.rows_per_s"] / figures[f"{name}.{kind}.rows_per_s"]
    return result
