"""``tierstore train --plan``: the plan's file, and what it predicted beside what the ranks measured."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.ranks import ALONE, Ranks, join, number_of_ranks
from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan
from tierstore.result_file import option_errors
from tierstore.simulation import Counts, counts_of

if TYPE_CHECKING:
    from tierstore.cli.trainer import Trainer

_MOST_LINES = 40


@dataclass(frozen=True)
class PlanFile:
    """A plan, and the predictions beside it. Plans that Python saved have none: None, 0, and no tables."""

    plan: ShardingPlan
    device: str = ""
    """The device that the plan was made for; the plan itself is for any."""
    batch_size: int = 0
    """Examples per rank and step."""
    step_seconds: float | None = None
    exchange_bytes: int | None = None
    """Bytes that all ranks together receive in a step."""
    rows: Mapping[tuple[str, int], Sequence[float]] = field(default_factory=dict)
    """By table and rank, per step: distinct rows, misses of hbm, and rows that the SSD brings."""
    policy: str = ""
    """The eviction policy under which these were simulated; empty where they come from curves."""
    batches: int = 0
    """The batches of the simulation, of which the last half is predicted; 0 where there was none."""

    @classmethod
    def load(cls, path: Path) -> PlanFile:
        """Read what ``tierstore plan --json`` or ``ShardingPlan.save`` wrote; ConfigError for other files."""
        with option_errors("--plan", path):
            plan = ShardingPlan.load(path)
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("feasible") is False:
            raise ConfigError(f"--plan {path}: the tables do not fit the machines of this plan; plan again")
        try:
            return cls(
                replace(plan, device=""),
                plan.device,
                int(report.get("batch_size_per_rank", 0)),
                None if (step := report.get("predicted_step_s")) is None else float(step),
                _exchange_bytes(report),
                _rows(plan, report),
                *_simulated(report.get("simulated", {})),
            )
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"--plan {path}: its predictions cannot be read ({error}); plan again"
            ) from error


def _exchange_bytes(report: Mapping[str, Any]) -> int | None:
    ranks = report.get("ranks", [])
    known = ranks and all("exchange_bytes" in rank for rank in ranks)
    return sum(int(rank["exchange_bytes"]) for rank in ranks) if known else None


def _simulated(known: Mapping[str, Any]) -> tuple[str, int]:
    return str(known.get("policy", "")), sum(int(known.get(n, 0)) for n in ("cold_batches", "batches"))


def _rows(plan: ShardingPlan, report: Mapping[str, Any]) -> dict[tuple[str, int], list[float]]:
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for table, entry in zip(plan.tables, report["tables"], strict=True):
        for shard, predicted in zip(table.shards, entry.get("predicted", ()), strict=False):
            of = sums[table.name, shard.rank]
            for i, figure in enumerate(("unique_rows", "hbm_misses", "memory_misses")):
                of[i] += float(predicted[figure])
    return sums


def planned_ranks(args: argparse.Namespace) -> tuple[Ranks, PlanFile | None]:
    """Return the ranks that train, and their plan. Raises ConfigError for ranks without a plan, and for a
    plan of another number of ranks."""
    if args.plan is None:
        if number_of_ranks() > 1:
            raise ConfigError(
                f"torchrun started {number_of_ranks()} ranks, and there is no plan for them; give --plan "
                "JSON (tierstore plan makes it), or train in one process without torchrun"
            )
        return ALONE, None
    file = PlanFile.load(args.plan)
    return join(file.plan.world_size), file


@dataclass(frozen=True)
class Sample:
    """What a rank has counted at one moment of a training."""

    batches: int
    seconds: float
    bytes_sent: int
    tables: Mapping[str, Counts]

    @classmethod
    def of(cls, trainer: Trainer) -> Sample:
        env = trainer.ranks.env
        assert env is not None
        return cls(
            trainer.batches, time.perf_counter(), env.traffic.bytes_sent, counts_of(trainer.embeddings.engine)
        )


class Samples:
    """Takes a sample of ``trainer`` in the middle of the training, where the tiers are warm, and at its end;
    none unless ``wanted``. Where nobody knows the end, the first sample is of the beginning."""

    def __init__(self, trainer: Trainer, wanted: bool) -> None:
        self.taken = wanted
        self._trainer = trainer
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._middle = -1

    def after_step(self) -> None:
        """Take a sample after this batch, if it is time for one."""
        if not self.taken:
            return
        trainer = self._trainer
        total, done = trainer.batches_total, trainer.batches
        if self._middle < 0:
            self._middle = done + (total - done) // 2 if total is not None else done
        if done == self._middle:
            self._first = Sample.of(trainer)
        if done == total:
            self._last = Sample.of(trainer)

    def between(self) -> tuple[Sample, Sample]:
        """Return both samples; the same one twice if there was no batch between them."""
        last = self._last or Sample.of(self._trainer)
        return self._first or last, last


@dataclass(frozen=True)
class TableLine:
    """Figures per step of a table's shards on one rank; None where the plan says nothing."""

    table: str
    rank: int
    predicted_rows: float | None
    rows: float
    predicted_misses: float | None
    misses: float
    new: float
    """Of the misses measured, first uses of rows. Recorded curves leave these out, so predictions by curves
    do, too; predictions that were simulated have them."""
    predicted_reads: float | None
    reads: float
    """Rows that the SSD brings."""


@dataclass(frozen=True)
class Predicted:
    """Predicted beside measured, per step: means over ``batches`` batches, the last half of the training."""

    plan: PlanFile
    batch_size: int
    batches: int
    step_seconds: float
    exchange_bytes: float
    tables: tuple[TableLine, ...]
    policy: str = ""
    """The eviction policy of the training."""

    @classmethod
    def measured(
        cls, plan: PlanFile, batch_size: int, between: Sequence[tuple[Sample, Sample]], policy: str = ""
    ) -> Predicted | None:
        """Compare with what each rank counted between two samples; None if that was no batch."""
        first, last = between[0]
        batches = last.batches - first.batches
        if not batches:
            return None
        lines = []
        names = [table.name for table in plan.plan.tables]
        for name in names:
            for rank, (begin, end) in enumerate(between):
                if name not in end.tables:
                    continue
                counted = end.tables[name].per_batch(begin.tables.get(name, Counts()), batches)
                rows, misses, reads = plan.rows.get((name, rank), (None, None, None))
                figures = rows, counted.rows, misses, counted.hbm_misses, counted.new, reads
                lines.append(TableLine(name, rank, *figures, counted.ssd_reads))
        seconds = max(end.seconds - begin.seconds for begin, end in between)
        sent = sum(end.bytes_sent - begin.bytes_sent for begin, end in between)
        return cls(plan, batch_size, batches, seconds / batches, sent / batches, tuple(lines), policy)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return {
            "batches": self.batches,
            "step_seconds": {"predicted": self.plan.step_seconds, "measured": self.step_seconds},
            "exchange_bytes": {"predicted": self.plan.exchange_bytes, "measured": self.exchange_bytes},
            "tables": [asdict(line) for line in self.tables],
        }

    def print(self, console: Any) -> None:
        """Print the comparison: the step, the bytes, and the misses of each table and rank."""
        from rich import box
        from rich.table import Table

        from tierstore.config import format_bytes

        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("per step", "predicted", "measured"):
            grid.add_column(title, justify="left" if title == "per step" else "right")
        step, sent = self.plan.step_seconds, self.plan.exchange_bytes
        grid.add_row("time", _ms(step), _ms(self.step_seconds))
        predicted = "" if sent is None else format_bytes(sent)
        grid.add_row("bytes that ranks exchange", predicted, format_bytes(int(self.exchange_bytes)))
        console.print(grid)
        misses = "rows, predicted", "measured", "misses of hbm, predicted", "measured", "new"
        console.print(self._grid(misses, "predicted_rows", "rows", "predicted_misses", "misses", "new"))
        if any(line.reads or line.predicted_reads for line in self.tables):
            reads = "reads of ssd, predicted", "measured"
            console.print(self._grid(reads, "predicted_reads", "reads"))
        if len(self.tables) > _MOST_LINES:
            console.print(f"... and {len(self.tables) - _MOST_LINES} more (--json has all)")
        for remark in self._remarks():
            console.print(remark)

    def _grid(self, titles: Sequence[str], *fields: str) -> Any:
        """Return a table of ``fields`` of each line."""
        from rich import box
        from rich.table import Table

        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        grid.add_column("table", overflow="fold")
        for title in ("rank", *titles):
            grid.add_column(title, justify="right")
        for line in self.tables[:_MOST_LINES]:
            grid.add_row(line.table, str(line.rank), *(_count(getattr(line, name)) for name in fields))
        return grid

    def _remarks(self) -> list[str]:
        plan, lines = self.plan, [f"measured: means over the last {self.batches:,} batches"]
        if any(line.new for line in self.tables):
            left_out = "" if plan.policy else ", which recorded curves leave out"
            lines.append(f"new: of these, first uses of rows{left_out}")
        if plan.policy not in ("", self.policy):
            lines.append(
                f"misses are predicted for policy {plan.policy}, and this training has {self.policy}: plan "
                f"with --policy {self.policy}"
            )
        if plan.batches and plan.batches // 2 != self.batches:
            lines.append(
                f"misses and reads are predicted for the last half of {plan.batches:,} batches: plan with as "
                "many --steps as a training has"
            )
        if plan.step_seconds is None:
            lines.append("the plan has no predictions; tierstore plan --json writes them")
        if plan.batch_size not in (0, self.batch_size):
            lines.append(
                f"predictions are for {plan.batch_size:,} examples per rank and step, and there were "
                f"{self.batch_size:,}"
            )
        if plan.device == "cuda":
            lines.append(
                "the plan is for ranks with GPUs, and its time too; sharded tables are on CPUs today "
                "(a topology with device: cpu plans for these)"
            )
        return lines


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g} ms"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def check_tables(file: PlanFile, tables: Sequence[Any], path: Path) -> None:
    """Raise ConfigError unless the plan is for the data set's ``tables``, configurations of collections."""
    try:
        file.plan.check(tables, file.plan.world_size)
    except ConfigError as error:
        raise ConfigError(
            f"--plan {path}: {error}; give a plan for the tables of --data and --dim"
        ) from error
