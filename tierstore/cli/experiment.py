"""One call of ``tierstore train``: a run with tiers, if asked another all in memory, and what they showed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore import optim
from tierstore.cli import checkpoint
from tierstore.cli.compare import compare, touched_ids
from tierstore.cli.interrupt import GracefulInterrupt
from tierstore.cli.memory import PeakRss, machine
from tierstore.cli.progress import Display
from tierstore.cli.report import JsonFile, Report, RunResult, Scalars
from tierstore.cli.setup import finish_imports, load_dataset, open_trainer, tier_config
from tierstore.cli.trainer import Trainer
from tierstore.config import TierConfig
from tierstore.errors import TierStoreError

EXIT_DIFFERENT = 1


class Experiment:
    """Checks all options before it trains; :meth:`run` gives the exit code."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        checkpoint.check_folder(args.ssd, args.resume)
        self.json = JsonFile(args.json) if args.json else None
        torch.set_num_threads(args.threads)
        tierstore.set_num_threads(args.threads)
        self.optimizer = optim.make(args.optimizer.replace("-", "_"), lr=args.lr)
        self.dataset = load_dataset(args)
        self.row_bytes = self.optimizer.row_bytes(args.dim)
        self.table_bytes = sum(table.num_embeddings for table in self.dataset.tables) * self.row_bytes
        """Of all rows, weights and optimizer state, whether they are ever touched or not."""
        self.config = tier_config(args, self.table_bytes)
        self.scalars = Scalars(args.tensorboard)
        self.started = self.saved = False

    def run(self) -> int:
        """0; 1 if a comparison found a difference; 128 + signal if stopped."""
        interrupt = GracefulInterrupt()
        try:
            report = self._runs(interrupt)
        except (KeyboardInterrupt, TierStoreError):
            if self.started:
                self._tell_what_is_left()
            raise
        finally:
            self.scalars.close()
        if report is None:
            self._tell_what_is_left()
            return 128 + interrupt.signal if interrupt.signal else 1
        self._tell(report)
        return EXIT_DIFFERENT if report.comparison and not report.comparison.bit_identical else 0

    def _runs(self, interrupt: GracefulInterrupt) -> Report | None:
        """The report, or None when a signal ended it."""
        finish_imports()
        args, rss = self.args, PeakRss()
        with self._open(self.config) as tiered:
            if args.resume:
                checkpoint.load(tiered, args)
            first = self._train(tiered, "tiered", interrupt, self.scalars, rss)
            if first is None:
                return None
            second = comparison = None
            if args.compare:
                rss = PeakRss()
                with self._open(replace(self.config, hbm="all", path=None)) as memory:
                    second = self._train(memory, "in memory", interrupt, Scalars(None), rss)
                    if second is None:
                        return None
                    print("comparing every row touched ...", file=sys.stderr, flush=True)
                    comparison = compare(tiered, memory, touched_ids(tiered.schedule.draw(self.dataset)))
        sizes = (self.table_bytes, self.row_bytes, self._budget())
        return Report(self._options(), machine(), *sizes, first, second, comparison)

    def _open(self, config: TierConfig) -> Any:
        return open_trainer(self.args, self.dataset, self.optimizer, config)

    def _train(
        self, trainer: Trainer, title: str, interrupt: GracefulInterrupt, scalars: Scalars, rss: PeakRss
    ) -> RunResult | None:
        """Trains, saves and evaluates; None when a signal ended the training (what it reached is saved)."""
        self.started = True
        with Display(title) as display, interrupt:

            def show() -> None:
                progress = trainer.progress()
                display.show(progress)
                scalars.write(progress)

            def after_step() -> bool:
                if display.due():
                    show()
                return interrupt.signal is None

            finished = trainer.train(self.dataset, after_step)
            show()
            if self.args.ssd is not None and trainer.embeddings.engine.store is not None:
                checkpoint.save(trainer, self.args)
                self.saved = True
        if not finished or interrupt.signal is not None:
            return None
        progress, stats = trainer.progress(), trainer.embeddings.stats()
        hit_rate = {name: tier["hit_rate"] for name, tier in stats["tiers"].items()}
        ssd_bytes = stats["store"]["disk_bytes"] if stats["store"] else 0
        auc, base_rate = trainer.evaluate(self.dataset)
        return RunResult(progress, auc, base_rate, hit_rate, ssd_bytes, rss.before_bytes, rss.peak_bytes())

    def _tell(self, report: Report) -> None:
        from rich.console import Console

        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(report.table())
        for line in report.sentences():
            console.print(line)
        if self.args.ssd is not None:
            console.print(f"rows and dense parameters: {self.args.ssd} (see tierstore inspect)")
        if self.json:
            self.json.write(report.to_json())
            console.print(f"figures: {self.args.json}")

    def _tell_what_is_left(self) -> None:
        if self.saved:
            text = f"saved in {self.args.ssd}; to go on, repeat the command with --resume"
        elif self.args.ssd is not None:
            text = f"{self.args.ssd} holds what was committed before this run, and nothing of it"
        else:
            text = "nothing is kept, since the store was a temporary one; name a folder by --ssd to keep it"
        print(text, file=sys.stderr)

    def _budget(self) -> int:
        """Bytes of the memory tiers; all of the tables' where they may take what they need."""
        return self.table_bytes if self.config.keeps_all else int(self.config.hbm) + int(self.config.uvm)

    def _options(self) -> dict[str, Any]:
        ours = ("run", "command", "debug")
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.args).items() if k not in ours}
