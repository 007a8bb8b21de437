"""One call of ``tierstore train``: a run with tiers, a run in memory if asked for, and the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore import optim
from tierstore.cache.opening import read_ahead_bytes
from tierstore.cli import checkpoint
from tierstore.cli.checkpoint import Saver
from tierstore.cli.compare import compare, touched_ids
from tierstore.cli.interrupt import GracefulInterrupt
from tierstore.cli.memory import PeakRss
from tierstore.cli.progress import Display
from tierstore.cli.report import Report, RunResult, Scalars
from tierstore.cli.setup import finish_imports, load_dataset, open_trainer, tier_config
from tierstore.cli.trainer import Trainer
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, TierStoreError
from tierstore.result_file import JsonFile, machine, option_errors
from tierstore.trace import TraceRecorder

EXIT_DIFFERENT = 1


class Experiment:
    """Trains as the options say, after it has checked all options; :meth:`run` returns the exit code."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        checkpoint.check(args)
        self.json = JsonFile(args.json) if args.json else None
        self.curves_file = JsonFile(args.save_curves, "--save-curves") if args.save_curves else None
        self.curves: dict[str, Any] | None = None
        if not 0 < args.record_rate <= 1:
            raise ConfigError(f"--record-rate must be above 0 and at most 1, not {args.record_rate:g}")
        torch.set_num_threads(args.threads)
        tierstore.set_num_threads(args.threads)
        self.optimizer = optim.make(args.optimizer.replace("-", "_"), lr=args.lr)
        self.dataset = load_dataset(args)
        self.row_bytes = self.optimizer.row_bytes(args.dim)
        self.table_bytes = sum(table.num_embeddings for table in self.dataset.tables) * self.row_bytes
        """Bytes of all rows, weights and optimizer state, touched or not."""
        self.config = tier_config(args, self.table_bytes)
        self.scalars = Scalars(args.tensorboard)
        self.folder = checkpoint.folder_of(args)
        self.started = False
        self.saved: int | None = None
        """Batches of the last known checkpoint."""

    def run(self) -> int:
        """Return 0, or 1 if a comparison found a difference, or 128 + the signal that stopped the run."""
        interrupt = GracefulInterrupt()
        try:
            report = self._runs(interrupt)
        except (KeyboardInterrupt, TierStoreError):
            if self.started:
                self._print_resume_hint()
            raise
        finally:
            self.scalars.close()
        if report is None:
            self._print_resume_hint()
            return 128 + interrupt.signal if interrupt.signal else 1
        self._print_report(report)
        return EXIT_DIFFERENT if report.comparison and not report.comparison.bit_identical else 0

    def _runs(self, interrupt: GracefulInterrupt) -> Report | None:
        """Return the report, or None when a signal ended the training."""
        finish_imports()
        args, rss = self.args, PeakRss()
        checkpoint.make_folder(args)
        with self._open(self.config) as tiered:
            saver = self._begin(tiered, rss)
            with self._recording(tiered):
                first = self._train(tiered, "tiered", interrupt, self.scalars, rss, saver)
            if first is None:
                return None
            second = comparison = None
            if args.compare:
                rss = PeakRss()
                with self._open(replace(self.config, hbm="all", uvm=0, ssd=0, path=None)) as memory:
                    second = self._train(memory, "in memory", interrupt, Scalars(None), rss)
                    if second is None:
                        return None
                    if self.config.lower_format.is_wide:
                        print("comparing every row touched ...", file=sys.stderr, flush=True)
                        ids = touched_ids(tiered.schedule.draw(self.dataset))
                        comparison = compare(tiered, memory, ids)
        sizes = (self.table_bytes, self.row_bytes, self._budget(), self._read_ahead())
        return Report(self._options(), machine(), *sizes, first, second, comparison)

    def _begin(self, trainer: Trainer, rss: PeakRss) -> Saver | None:
        """Bring the trainer to where the run goes on; return None if the run is not saved."""
        if self.folder is None or trainer.embeddings.engine.store is None:
            return None
        saver = Saver(trainer, self.args, self.folder, rss.peak_bytes)
        if (not self.args.resume or not saver.resume()) and self.args.checkpoint is not None:
            saver.save()  # a run that is killed early is then known to have no rows
        self.saved = saver.saved
        return saver

    @contextmanager
    def _recording(self, trainer: Trainer) -> Iterator[None]:
        """Write the trace that ``--record`` asks for; a training that ends early leaves a readable file."""
        if self.args.record is None:
            yield
            return
        tables = {table.name: table.num_embeddings for table in self.dataset.tables}
        with option_errors("--record", self.args.record):
            recorder = TraceRecorder(self.args.record, tables, self.args.record_rate)
        with recorder:
            trainer.recorder = recorder
            yield

    def _open(self, config: TierConfig) -> Any:
        return open_trainer(self.args, self.dataset, self.optimizer, config)

    def _train(
        self,
        trainer: Trainer,
        title: str,
        interrupt: GracefulInterrupt,
        scalars: Scalars,
        rss: PeakRss,
        saver: Saver | None = None,
    ) -> RunResult | None:
        """Train, save and evaluate; return None when a signal ended the training, whose progress is saved."""
        self.started = True
        with Display(title) as display, interrupt:

            def show() -> None:
                progress = trainer.progress()
                display.show(progress)
                scalars.write(progress)

            def after_step() -> bool:
                if display.due():
                    show()
                if saver is not None:
                    saver.after_step()
                    self.saved = saver.saved
                return interrupt.signal is None

            finished = trainer.train(self.dataset, after_step)
            show()
            if saver is not None:
                saver.save()
                self.saved = saver.saved
        if not finished or interrupt.signal is not None:
            return None
        progress, stats = trainer.progress(), trainer.embeddings.stats()
        hit_rate = {name: tier["hit_rate"] for name, tier in stats["tiers"].items()}
        ssd_bytes = stats["store"]["disk_bytes"] if stats["store"] else 0
        slots = {"hbm": sum(group["slots"] for group in stats["groups"].values())}
        if self.args.save_curves and self.curves is None:
            self.curves = trainer.embeddings.table_curves()
        auc, base_rate = trainer.evaluate(self.dataset)
        peak = rss.peak_bytes() if saver is None else saver.peak_rss_bytes()
        group = next(iter(stats["groups"].values()))
        known = group["depth"], group["window"]
        return RunResult(progress, auc, base_rate, hit_rate, slots, ssd_bytes, *known, rss.before_bytes, peak)

    def _print_report(self, report: Report) -> None:
        from rich.console import Console

        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(report.table())
        for line in report.sentences():
            console.print(line)
        if self.saved is not None:
            rows = ", ".join(map(str, checkpoint.store_of(self.args) or []))
            console.print(f"checkpoint: {self.folder}; rows: {rows}")
        if self.json:
            self.json.write(report.to_json())
            console.print(f"figures: {self.args.json}")
        if self.curves_file:
            self.curves_file.write(self.curves or {})
            console.print(f"curves: {self.args.save_curves} (for tierstore plan --stats)")
        if self.args.record:
            console.print(f"trace: {self.args.record} (for tierstore bench hit-rate)")

    def _print_resume_hint(self) -> None:
        if self.saved is not None:
            text = f"saved after {self.saved:,} batches in {self.folder}"
            text += "; to go on, repeat the command with --resume"
        elif self.folder is not None:
            text = f"{self.folder} holds what was saved before this run, and nothing of it"
        else:
            text = "nothing is kept, since the store was a temporary one; name a folder by --checkpoint DIR"
        print(text, file=sys.stderr)

    def _budget(self) -> int:
        """Return the bytes of the memory tiers, or of all tables where tiers may take what they need."""
        return self.table_bytes if self.config.keeps_all else int(self.config.hbm) + int(self.config.uvm)

    def _read_ahead(self) -> int:
        """Return the most bytes that rows read ahead may take beside the budget."""
        return read_ahead_bytes(self.config, self.table_bytes) if self.config.ssd_cap else 0

    def _options(self) -> dict[str, Any]:
        ours = ("run", "command", "debug")
        return {k: _plain(v) for k, v in vars(self.args).items() if k not in ours}


def _plain(value: object) -> object:
    """Return an argument as JSON has it: paths are strings."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
