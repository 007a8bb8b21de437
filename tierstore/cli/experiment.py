"""One call of ``tierstore train``: a run with tiers, a run in memory if asked for, and the report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore import optim
from tierstore.cache.opening import read_ahead_bytes
from tierstore.cache.tiers.sizes import as_policy
from tierstore.cli import checkpoint
from tierstore.cli.checkpoint import Saver
from tierstore.cli.compare import compare, touched_ids
from tierstore.cli.interrupt import EXIT_INTERRUPTED, GracefulInterrupt
from tierstore.cli.memory import PeakRss
from tierstore.cli.messages import results_console, say
from tierstore.cli.planned import PlanFile, Predicted, Samples, check_tables
from tierstore.cli.progress import Display
from tierstore.cli.ranks import ALONE, Ranks
from tierstore.cli.recording import planners_curves, recording
from tierstore.cli.report import RankFigures, Report, RunResult, Scalars
from tierstore.cli.setup import (
    check_options,
    finish_imports,
    load_dataset,
    open_trainer,
    table_configs,
    tier_config,
)
from tierstore.cli.trainer import Trainer
from tierstore.config import TierConfig
from tierstore.errors import TierStoreError
from tierstore.result_file import JsonFile, ResultFile, machine

EXIT_DIFFERENT = 1


class Experiment:
    """Trains as the options say, after it has checked all options; :meth:`run` returns the exit code.

    ``ranks`` train together by ``plan``, and rank 0 prints.
    """

    def __init__(self, args: argparse.Namespace, ranks: Ranks = ALONE, plan: PlanFile | None = None) -> None:
        self.args, self.ranks, self.plan = args, ranks, plan
        ranks.on_rank_0(lambda: checkpoint.check(args, ranks))
        with ranks.shared_errors():
            self._prepare()
        self.curves: dict[str, Any] | None = None
        self.predicted: Predicted | None = None
        self.folder = checkpoint.folder_of(args)
        self.started = False
        self.reader_gone = False
        self.saved: int | None = None
        """Batches of the last known checkpoint."""

    def _prepare(self) -> None:
        """Check and open what the options name."""
        args, prints = self.args, self.ranks.prints
        self.json = JsonFile(args.json) if args.json and prints else None
        self.curves_file = (
            JsonFile(args.save_curves, "--save-curves") if args.save_curves and prints else None
        )
        if args.record and prints:
            ResultFile(args.record, "--record")
        tierstore.set_num_threads(args.threads)  # refuses more threads than torch survives
        torch.set_num_threads(args.threads)
        self.optimizer = optim.make(args.optimizer.replace("-", "_"), lr=args.lr)
        check_options(args)
        self.dataset = load_dataset(args)
        if self.plan is not None:
            check_tables(self.plan, table_configs(self.dataset, args.dim), args.plan)
        self.row_bytes = self.optimizer.row_bytes(args.dim)
        self.table_bytes = sum(table.num_embeddings for table in self.dataset.tables) * self.row_bytes
        """Bytes of all rows, weights and optimizer state, touched or not."""
        self.config = tier_config(args, self.table_bytes // self.ranks.size)
        self.scalars = Scalars(args.tensorboard if prints else None, args.tensorboard_every)

    def run(self) -> int:
        """Return 0, or 1 if a comparison found a difference, or 128 + the signal that stopped the run."""
        interrupt = GracefulInterrupt(says=not self.ranks.sharded)
        try:
            report = self._runs(interrupt)
        except (KeyboardInterrupt, TierStoreError):
            if self.started:
                self._print_resume_hint()
            raise
        finally:
            self.scalars.close()
        if self.reader_gone:
            raise BrokenPipeError  # as of other commands, see console.py
        if report is None:
            self._print_resume_hint()
            other = EXIT_INTERRUPTED if self.ranks.sharded else 1
            return 128 + interrupt.signal if interrupt.signal else other
        if self.ranks.prints:
            self._print_report(report)
        return EXIT_DIFFERENT if report.comparison and not report.comparison.bit_identical else 0

    def _runs(self, interrupt: GracefulInterrupt) -> Report | None:
        """Return the report, or None when a signal ended the training."""
        finish_imports(self.config.policy)
        args, rss = self.args, PeakRss()
        self.ranks.on_rank_0(lambda: checkpoint.make_folder(args))
        with self._open(self.config) as tiered:
            saver = self._begin(tiered, rss)
            with self._recording(tiered):
                first = self._train(tiered, "tiered", interrupt, self.scalars, rss, saver)
            if first is None:
                return None
            second = comparison = None
            if args.compare:
                rss = PeakRss()
                with self._open(_in_memory(self.config), in_memory=True) as memory:
                    second = self._train(memory, "in memory", interrupt, Scalars(None), rss)
                    if second is None:
                        return None
                    if self.config.lower_format.is_wide:
                        self._say("comparing every row touched ...")
                        ids = touched_ids(tiered.schedule.draw(self.dataset))
                        comparison = compare(tiered, memory, ids)
            budget = sum(self.ranks.gather(self._budget(tiered)))
        sizes = (self.table_bytes, self.row_bytes, budget, self._read_ahead())
        return Report(self._options(), machine(), *sizes, first, second, comparison, self.predicted)

    def _begin(self, trainer: Trainer, rss: PeakRss) -> Saver | None:
        """Bring the trainer to where the run goes on; return None if the run is not saved."""
        lasting = trainer.embeddings.engine.store is not None or self.ranks.sharded
        if self.folder is None or not lasting:
            return None
        saver = Saver(trainer, self.args, self.folder, rss.peak_bytes)
        if (not self.args.resume or not saver.resume()) and self.args.checkpoint is not None:
            saver.save()  # a run that is killed early is then known to have no rows
        self.saved = saver.saved
        return saver

    @contextmanager
    def _recording(self, trainer: Trainer) -> Iterator[None]:
        """Write the trace that ``--record`` asks for."""
        if self.args.record is None:
            yield
            return
        tables = {table.name: table.num_embeddings for table in self.dataset.tables}
        with recording(self.args.record, tables, self.args.record_rate, self.ranks) as found:
            trainer.recording = found
            yield

    def _open(self, config: TierConfig, in_memory: bool = False) -> Any:
        plan = None if self.plan is None else self.plan.plan
        if plan is not None and in_memory:
            from tierstore.sharding.planning import without_bytes

            plan = without_bytes(plan)
        return open_trainer(self.args, self.dataset, self.optimizer, config, self.ranks, plan)

    def _train(
        self,
        trainer: Trainer,
        title: str,
        interrupt: GracefulInterrupt,
        scalars: Scalars,
        rss: PeakRss,
        saver: Saver | None = None,
    ) -> RunResult | None:
        """Train, save and evaluate; return None when a signal, or the reader of the progress, ended the
        training. What it has trained is saved."""
        self.started = True
        sharded = self.ranks.sharded
        samples = Samples(trainer, self.plan is not None and title == "tiered")
        with Display(title, quiet=not self.ranks.prints) as display, interrupt:
            trainer.interrupted = lambda: interrupt.signal is not None or display.reader_gone

            def after_step() -> bool:
                if display.due():
                    display.show(trainer.progress())
                if scalars.due(trainer.batches):
                    scalars.write(trainer.progress())
                samples.after_step()
                if saver is not None:
                    saver.after_step()
                    self.saved = saver.saved
                return sharded or not trainer.interrupted()  # ranks agree on it in their step

            finished = trainer.train(self.dataset, after_step)
            display.show(trainer.progress())
            scalars.write(trainer.progress())
            if saver is not None:
                saver.save()
                self.saved = saver.saved
        if not finished or trainer.stopping or (not sharded and trainer.interrupted()):
            self.reader_gone = display.reader_gone
            return None
        if self.plan is not None and samples.taken:
            between = self.ranks.gather(samples.between())
            size, policy = self.args.batch_size, as_policy(self.config.policy).name
            self.predicted = Predicted.measured(self.plan, size, between, policy)
        return self._result(trainer, rss, saver)

    def _result(self, trainer: Trainer, rss: PeakRss, saver: Saver | None) -> RunResult:
        """Evaluate, and return the figures of all ranks together."""
        stats, progress = trainer.embeddings.stats(), trainer.progress()
        if self.args.save_curves and self.curves is None:
            plan = None if self.plan is None else self.plan.plan
            self.curves = planners_curves(trainer.embeddings.engine, plan, self.ranks)
        auc, base_rate = trainer.evaluate(self.dataset)
        own = RankFigures(
            stats["tiers"],
            stats["store"]["disk_bytes"] if stats["store"] else 0,
            sum(group["slots"] for group in stats["groups"].values()),
            stats["stall_seconds"],
            rss.before_bytes,
            rss.peak_bytes() if saver is None else saver.peak_rss_bytes(),
        )
        known = next(iter(stats["groups"].values()))
        everyone = self.ranks.gather(own)
        return RunResult.of(everyone, progress, (auc, base_rate), (known["depth"], known["window"]))

    def _say(self, text: str) -> None:
        if self.ranks.prints:
            say(text)

    def _print_report(self, report: Report) -> None:
        console = results_console()
        console.print(report.table())
        if report.predicted is not None:
            report.predicted.print(console)
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
        self._say(text)

    def _budget(self, trainer: Trainer) -> int:
        """Return the bytes of this rank's memory tiers; of all tables where tiers may take what they need."""
        config = trainer.embeddings.engine.config
        if config.keeps_all:
            return self.table_bytes // self.ranks.size
        return int(config.hbm) + int(config.uvm)

    def _read_ahead(self) -> int:
        """Return the most bytes that rows read ahead may take beside the budget."""
        if not self.config.ssd_cap:
            return 0
        size = self.ranks.size
        return size * read_ahead_bytes(self.config, self.table_bytes // size)

    def _options(self) -> dict[str, Any]:
        ours = ("run", "command", "debug")
        return {k: _plain(v) for k, v in vars(self.args).items() if k not in ours}


def _in_memory(config: TierConfig) -> TierConfig:
    return replace(config, hbm="all", uvm=0, ssd=0, path=None)


def _plain(value: object) -> object:
    """Return an argument as JSON has it: paths are strings."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
