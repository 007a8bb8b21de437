"""The result of ``tierstore train``: JSON, the closing table, TensorBoard scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierstore.cli.compare import Comparison
from tierstore.cli.planned import Predicted
from tierstore.cli.progress import Progress
from tierstore.config import format_bytes
from tierstore.errors import ConfigError
from tierstore.result_file import option_errors


@dataclass(frozen=True)
class RunResult:
    """Figures of one run. Rates are of the training loop; ``auc`` and ``base_rate`` of the held-out part."""

    progress: Progress
    auc: float
    base_rate: float
    hit_rate: dict[str, dict[str, float | None]]
    """Hit rates by tier: ``per_access`` and ``per_unique`` row of a batch."""
    slots: dict[str, int]
    """The number of rows that the memory tiers have room for."""
    ssd_bytes: int
    depth: int | None
    window: int | None
    """Depth and window of the prefetch, as they were chosen."""
    rss_before_bytes: int
    """Resident bytes after imports and opening the data, before the tiers were made."""
    peak_rss_bytes: int
    """The most resident bytes from then to the end of the evaluation."""

    @classmethod
    def of(
        cls,
        ranks: Sequence[RankFigures],
        progress: Progress,
        held_out: tuple[float, float],
        ahead: tuple[int | None, int | None],
    ) -> RunResult:
        """Add up the figures of all ranks. ``held_out``: AUC and base rate; ``ahead``: depth and window."""
        stall = sum(rank.stall_seconds for rank in ranks) / len(ranks)
        hits = _hit_rates([rank.tiers for rank in ranks])
        per_access = {name: rate for name, tier in hits.items() if (rate := tier["per_access"]) is not None}
        return cls(
            replace(progress, stall_seconds=stall, hit_rate=per_access),
            *held_out,
            hits,
            {"hbm": sum(rank.slots for rank in ranks)},
            sum(rank.ssd_bytes for rank in ranks),
            *ahead,
            sum(rank.rss_before_bytes for rank in ranks),
            sum(rank.peak_rss_bytes for rank in ranks),
        )


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank's run. ``tiers``: of ``stats()``; ``slots``: rows that hbm has room for."""

    tiers: Mapping[str, Any]
    ssd_bytes: int
    slots: int
    stall_seconds: float
    rss_before_bytes: int
    peak_rss_bytes: int


def _hit_rates(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return the hit rates of the tiers, over the rows and accesses of all ranks."""

    def rate(name: str, hits: str, of: str) -> float | None:
        total = sum(tiers[name][of] for tiers in ranks if name in tiers)
        return sum(tiers[name][hits] for tiers in ranks if name in tiers) / total if total else None

    kinds = {"per_access": ("access_hits", "accesses"), "per_unique": ("row_hits", "rows")}
    names = dict.fromkeys(name for tiers in ranks for name in tiers)
    return {name: {kind: rate(name, *of) for kind, of in kinds.items()} for name in names}


@dataclass(frozen=True)
class Report:
    """All results of one call of ``tierstore train``."""

    config: dict[str, Any]
    machine: dict[str, Any]
    table_bytes: int
    row_bytes: int
    budget_bytes: int
    read_ahead_bytes: int
    """The most bytes that rows read ahead of their batches may take beside the budget."""
    tiered: RunResult
    in_memory: RunResult | None = None
    comparison: Comparison | None = None
    predicted: Predicted | None = None
    """Of a run by a plan."""

    def to_json(self) -> dict[str, Any]:
        tiered, memory, comparison = self.tiered, self.in_memory, self.comparison
        memory_speed = memory.progress.examples_per_s if memory else None
        return {
            "final_loss": _number(tiered.progress.loss),
            "auc": _number(tiered.auc),
            "in_memory_auc": _number(memory.auc) if memory else None,
            "base_rate": _number(tiered.base_rate),
            "bit_identical": comparison.bit_identical if comparison else None,
            "examples_per_s": tiered.progress.examples_per_s,
            "in_memory_examples_per_s": memory_speed,
            "ratio": tiered.progress.examples_per_s / memory_speed if memory_speed else None,
            "hit_rate": tiered.hit_rate,
            "slots": tiered.slots,
            "depth": tiered.depth,
            "window": tiered.window,
            "stall": tiered.progress.stall,
            "peak_rss_bytes": tiered.peak_rss_bytes,
            "rss_before_bytes": tiered.rss_before_bytes,
            "budget_bytes": self.budget_bytes,
            "read_ahead_bytes": self.read_ahead_bytes,
            "table_bytes": self.table_bytes,
            "touched_bytes": comparison.rows * self.row_bytes if comparison else None,
            "touched_share": comparison.rows * self.row_bytes / self.table_bytes if comparison else None,
            "ssd_bytes": tiered.ssd_bytes,
            "rows_compared": comparison.rows if comparison else None,
            "difference": comparison.difference if comparison else None,
            "batches": tiered.progress.batches,
            "examples": tiered.progress.examples,
            "seconds": tiered.progress.seconds,
            "plan": self.predicted.to_json() if self.predicted else None,
            "config": self.config,
            "machine": self.machine,
        }

    def table(self) -> Any:
        """Return the closing table, a rich renderable with one column per run."""
        from rich import box
        from rich.table import Table

        runs = [self.tiered, *([self.in_memory] if self.in_memory else [])]
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ["", "tiered", "in memory"][: len(runs) + 1]:
            grid.add_column(title, justify="right" if title else "left", no_wrap=True)
        for label, cells in _lines(runs):
            grid.add_row(label, *cells)
        return grid

    def sentences(self) -> list[str]:
        """Return the result in words, one line per fact."""
        times, budget = self.table_bytes / self.budget_bytes, format_bytes(self.budget_bytes)
        fits = (
            f"{times:.3g} times the memory budget of {budget}"
            if times > 1
            else f"all within {budget} of memory"
        )
        lines = [
            f"tables: {format_bytes(self.table_bytes)}{self._touched()}, {fits}",
            f"rows read ahead: at most {format_bytes(self.read_ahead_bytes)} beside the budget",
            f"AUC: {self.tiered.auc:.4f}; guessing has 0.5 ({self.tiered.base_rate:.1%} are positive)",
        ]
        if self.tiered.window is not None:
            options = f"--depth {self.tiered.depth} --window {self.tiered.window}"
            lines.append(f"prefetch: {options} (tierstore bench hit-rate simulates it with these)")
        if self.in_memory is not None:
            ratio = self.tiered.progress.examples_per_s / max(self.in_memory.progress.examples_per_s, 1e-9)
            lines.append(f"speed: {ratio:.2f} times that of training with everything in memory")
            lines.append(self._verdict(self.in_memory))
        return lines

    def _verdict(self, memory: RunResult) -> str:
        comparison = self.comparison
        if comparison is None:
            difference = self.tiered.auc - memory.auc
            return f"AUC: {difference:+.5f} against memory; lower tiers round rows, so no bits are compared"
        if comparison.bit_identical:
            what = f"{comparison.rows:,} rows touched, their optimizer state, the dense parameters"
            return f"bit_identical: true ({what})"
        return f"bit_identical: false; first difference: {comparison.difference}"

    def _touched(self) -> str:
        rows = self.comparison.rows if self.comparison else 0
        if not rows:
            return ""
        touched = rows * self.row_bytes
        return f" ({format_bytes(touched)}, {touched / self.table_bytes:.1%}, of it touched)"


def _lines(runs: list[RunResult]) -> list[tuple[str, list[str]]]:
    def line(label: str, cell: Any) -> tuple[str, list[str]]:
        return label, [cell(run) for run in runs]

    def hits(tier: str, kind: str) -> Any:
        def cell(run: RunResult) -> str:
            rate = run.hit_rate.get(tier, {}).get(kind)
            return "" if rate is None else f"{rate:.2%}"

        return cell

    lines = [
        line("examples/s", lambda run: f"{run.progress.examples_per_s:,.0f}"),
        line("training loss", lambda run: f"{run.progress.loss:.5f}"),
        line("AUC, held out", lambda run: f"{run.auc:.5f}"),
        line("AUC, as it trained", lambda run: f"{run.progress.auc:.5f}"),
    ]
    for tier in runs[0].hit_rate:
        lines.append(line(f"hits in {tier}, per access", hits(tier, "per_access")))
        lines.append(line(f"hits in {tier}, per unique row", hits(tier, "per_unique")))
    lines.append(line("waiting for rows", lambda run: f"{run.progress.stall:.1%}"))
    lines.append(line("peak RSS", lambda run: format_bytes(run.peak_rss_bytes)))
    lines.append(line("  of it before the tiers", lambda run: format_bytes(run.rss_before_bytes)))
    lines.append(line("on SSD", lambda run: format_bytes(run.ssd_bytes)))
    return lines


def _number(value: float) -> float | None:
    """Return ``value``, or None for NaN and the infinities, which JSON does not know."""
    return value if math.isfinite(value) else None


class Scalars:
    """TensorBoard scalars of the progress after every ``every`` batches; without a folder it does nothing."""

    def __init__(self, folder: Path | None, every: int = 1) -> None:
        self._every, self._last = every, -1
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard needs its package; pip install 'tierstore[plot]'") from error
        with option_errors("--tensorboard", folder):
            self._writer = SummaryWriter(log_dir=str(folder))

    def due(self, batches: int) -> bool:
        """Return whether there is a point after so many batches."""
        return self._writer is not None and batches % self._every == 0

    def write(self, progress: Progress) -> None:
        """Write a point, one at most of a number of batches."""
        if self._writer is None or progress.batches == self._last:
            return
        self._last = progress.batches
        values = {
            "train/loss": progress.loss,
            "train/auc": progress.auc,
            "speed/examples_per_s": progress.examples_per_s,
            "speed/stall": progress.stall,
            **{f"hit_rate/{tier}": rate for tier, rate in progress.hit_rate.items()},
        }
        for name, value in values.items():
            self._writer.add_scalar(name, value, progress.batches)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
