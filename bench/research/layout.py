"""Count what reading from the log costs by how rows are laid out in it, by simulation of whole trainings.

Every row is written once, in the order of tables and ids, before training begins. Misses and victims of
each plan come from the policy itself and are the same for every layout (:mod:`.layout_trace`). Each layout
then writes the victims to a log with compaction (:mod:`.layout_log`), and the sweep of reading ahead reads
the misses (:mod:`.layout_reading`). No clock is used: seconds are neither measured nor needed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_policies import PreparedTrace, prepare
from tierstore.optim import RowWiseAdagrad
from tierstore.result_file import JsonFile

from .._systems import table_configs
from .._training_arguments import add_training_arguments, load_dataset
from . import Results, main
from .layout_log import Geometry, Log
from .layout_reading import Reading
from .layout_trace import NEVER, Ahead, Plan, automatic, plans, slots_of

Rows = NDArray[np.int32]
Keys = NDArray[np.int64]

_DATA = "synthetic:zipf:0.8,synthetic:zipf:0.95,synthetic:zipf:0,flights"
_CALLS = 64  # after which the bounds of streams are chosen anew
_MOST_WINDOW = 512  # batches that are drawn beyond the last plan
_SHOWN = ("misses", "requests", "bytes", "write_amplification", "device_bytes")


@dataclass(frozen=True)
class Layout:
    """Where rows are written.

    ``order``: of the victims of ``plans`` plans, which are written together. ``streams``: open segments that
    the victims are divided among, by ``order`` in equal parts. ``copies``: order of the rows that compaction
    copies from a segment, to ``copy_streams`` open segments. ``dead``: superseded rows per row
    that compaction leaves (None: as the cap of the store has it).
    """

    order: str = "leaving"
    plans: int = 1
    streams: int = 1
    copies: str = "leaving"
    copy_streams: int = 1
    dead: float | None = None


LAYOUTS = {
    "today": Layout(),
    "next use": Layout("next use"),
    "class, row": Layout("class, row"),
    "row": Layout("row"),
    "uses": Layout("uses"),
    "uses, of 16 plans": Layout("uses", plans=16),
    "2 streams by next use": Layout("next use", streams=2),
    "4 streams by uses": Layout("uses", streams=4),
    "copies by age": Layout(copies="age"),
    "copies by uses": Layout(copies="uses"),
    "copies by row": Layout(copies="row"),
    "4 + 4 streams by uses": Layout("uses", streams=4, copies="uses", copy_streams=4),
    "4 + 4 streams by popularity": Layout("popularity", streams=4, copies="popularity", copy_streams=4),
    "a dead row per 2": Layout(dead=0.5),
    "a dead row per row": Layout(dead=1.0),
}
"""The popularity is of all plans before the plans that count: more than a training knows of its rows."""


class Knowledge:
    """What a layout may know of rows, newest first: an array by row for each word."""

    def __init__(self, rows: int, popularity: Keys) -> None:
        self.next_use = np.full(rows, NEVER, np.int32)
        self.uses = np.zeros(rows, np.int32)
        self.left = np.full(rows, -1, np.int32)  # when the row has last left memory
        self._popularity = popularity

    def learn(self, plan: Plan, seq: int) -> None:
        self.next_use[plan.victims], self.uses[plan.victims] = plan.next_use, plan.uses
        self.left[plan.victims] = seq

    def key(self, word: str) -> Callable[[Rows], Keys]:
        """Return the function that gives rows their keys: rows with small keys are written first."""
        by_word: dict[str, Callable[[Rows], Keys]] = {
            "leaving": lambda rows: np.arange(len(rows)),
            "next use": lambda rows: self.next_use[rows].astype(np.int64),
            "uses": lambda rows: self.uses[rows].astype(np.int64),
            "class, row": lambda rows: (_classes(self.uses[rows]) << 40) + rows,
            "age": lambda rows: self.left[rows].astype(np.int64),
            "row": lambda rows: rows.astype(np.int64),
            "popularity": lambda rows: self._popularity[rows],
        }
        return by_word[word]

    def streams(self, word: str, count: int) -> Callable[[Rows], Keys]:
        """Return the function that divides rows among ``count`` streams by their keys.

        The bounds divide all rows that have left memory in equal parts, or, by next use, each call's rows.
        """
        key, calls = self.key(word), itertools.count()
        bounds: list[Any] = []

        def stream(rows: Rows) -> Keys:
            if word == "next use" or next(calls) % _CALLS == 0:
                among = rows if word == "next use" else np.flatnonzero(self.left >= 0).astype(np.int32)
                bounds[:] = np.quantile(key(among), np.arange(1, count) / count) if len(among) else []
            return np.searchsorted(np.array(bounds), key(rows), side="right")

        return stream


def _classes(uses: Rows) -> Keys:
    """Return the number of bits of each number of uses."""
    return np.frexp(uses)[1].astype(np.int64)


class Training:
    """A log in one layout, under the plans of a training."""

    def __init__(self, log: Log, layout: Layout, ahead: Ahead, knowledge: Knowledge) -> None:
        self.log, self._layout, self._knowledge = log, layout, knowledge
        self.reading = Reading(log, ahead)
        self._leaving: list[Rows] = []
        self._key = knowledge.key(layout.order)
        self._stream = knowledge.streams(layout.order, layout.streams)
        if layout.copies != "leaving":
            log.copy_key = knowledge.key(layout.copies)
            log.copy_stream = knowledge.streams(layout.copies, layout.copy_streams)
        if layout.dead is not None:
            log.tolerated = layout.dead

    def step(self, seq: int, plan: Plan) -> None:
        reading = self.reading
        for rows, lookup in plan.announced:
            reading.announce(rows, lookup)
        reading.lookup(seq, plan)
        reading.waiting[plan.misses] = False  # rows that come back before they are written
        self._knowledge.learn(plan, seq)
        reading.leave(plan.victims, plan.next_use)
        reading.waiting[plan.victims] = True
        self._leaving.append(plan.victims)
        if len(self._leaving) == self._layout.plans:
            self._write()
            self.log.compact()
            reading.compacted()

    def _write(self) -> None:
        # A row may have left twice: its last place counts.
        rows = np.concatenate(self._leaving)
        self._leaving.clear()
        rows = rows[self.reading.waiting[rows]]
        rows = rows[np.sort(len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1])]
        self.reading.waiting[rows] = False
        if self._layout.order != "leaving":
            rows = rows[np.argsort(self._key(rows), kind="stable")]
        if self._layout.streams > 1:
            streams = self._stream(rows)
            for stream in range(self._layout.streams):
                self.log.append(rows[streams == stream], stream)
        else:
            self.log.append(rows)
        self.reading.written(rows)


def measure(training: Training, moves: Sequence[Plan], warm_up: int) -> dict[str, float]:
    """Return the mean figures of the plans after the first ``warm_up``."""
    log, before = training.log, {"read_by_plans": 0}
    for seq, plan in enumerate(moves):
        if seq == warm_up:
            before = {**vars(log.counts), "read_by_plans": training.reading.read_by_plans}
        training.step(seq, plan)
    after = {**vars(log.counts), "read_by_plans": training.reading.read_by_plans}
    gained = {name: (after[name] - before[name]) / (len(moves) - warm_up) for name in after}
    gained["misses"] = float(np.mean([len(plan.misses) for plan in moves[warm_up:]]))
    gained["write_amplification"] = 1 + gained["copied"] / gained["written"]
    moved = gained["compacted"] + (gained["written"] + gained["copied"]) * log.geometry.record
    gained["device_bytes"] = gained["bytes"] + gained["requests"] * log.gap + moved
    return gained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser, _DATA, batch_size=512, dim=64)
    parser.set_defaults(rows=250_000, tables=8)
    what = parser.add_argument_group("what to simulate: every combination of the data sets and")
    what.add_argument("--hbm", default="1/37,1/10", metavar="A,B", help="of the rows' bytes (1/37,1/10)")
    what.add_argument("--read-ahead", default="1/8", metavar="A,B", help="of the rows' bytes (1/8)")
    what.add_argument(
        "--ssd", default="1.33", metavar="A,B", help="cap of the store, per byte of rows (1.33)"
    )
    what.add_argument("--touched", action="store_true", help="write only rows that training uses")
    what.add_argument("--policy", default="lookahead", metavar="A,B", help="(default: lookahead)")
    what.add_argument("--gap", type=int, default=18_000, metavar="N", help="bytes read through (18000)")
    what.add_argument("--warm-up", type=int, default=1800, metavar="N", help="plans that do not count (1800)")
    what.add_argument("--plans", type=int, default=400, metavar="N", help="plans that count (400)")
    what.add_argument("--layouts", default=";".join(LAYOUTS), metavar="A;B", help="(default: all)")


def run(args: argparse.Namespace, target: JsonFile | None) -> Results:
    results: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}
    for data in args.data.split(","):
        trace = draw(args, data)
        choices = (value.split(",") for value in (args.hbm, args.read_ahead, args.policy))
        for hbm, read_ahead, policy in itertools.product(*choices):
            moved = _move(trace, args, Fraction(hbm), Fraction(read_ahead), policy)
            for ssd in args.ssd.split(","):
                case = f"{data}, hbm {hbm}, read-ahead {read_ahead}, {policy}, ssd {ssd}"
                results[case] = _compare(trace, moved, args, float(ssd))
                figures = results[case]["layouts"]
                first = next(iter(figures.values()))["requests"]
                ratios |= {f"{case}: {name}": f["requests"] / max(first, 1e-9) for name, f in figures.items()}
                if target is not None:
                    target.write({"cases": results})
    return ratios, {"options": {k: str(v) for k, v in vars(args).items()}, "cases": results}


@dataclass(frozen=True)
class _Trace:
    """Batches of row numbers; ``ids``: of one batch."""

    prepared: PreparedTrace
    rows: int
    ids: int
    geometry: Geometry
    row_bytes: int
    popularity: Keys


def draw(args: argparse.Namespace, data: str) -> _Trace:
    dataset: Any = load_dataset(argparse.Namespace(**{**vars(args), "data": data, **_sizes(args, data)}))
    sizes = [table.num_embeddings for table in table_configs(dataset, args.dim)]
    first, count = np.cumsum([0, *sizes]), args.warm_up + args.plans + _MOST_WINDOW
    per_epoch = dataset.num_train and -(-dataset.num_train // args.batch_size)
    epochs = -(-count // per_epoch) if per_epoch else 1

    def numbers() -> Iterator[NDArray[np.int64]]:
        for batch in itertools.islice(dataset.train(args.batch_size, epochs=epochs), count):
            table = np.repeat(np.arange(len(sizes)), np.diff(batch.sparse.offset_per_key()))
            yield batch.sparse.values().numpy() + first[table]

    prepared, rows = prepare(numbers()), int(first[-1])
    if args.touched:
        rows = prepared.footprint
        prepared = replace(prepared, keys=np.argsort(np.argsort(prepared.keys)))
    popularity = np.zeros(rows, np.int64)
    before = prepared.rows[: prepared.offsets[min(args.warm_up, prepared.batches)]]
    popularity[prepared.keys.astype(np.int64)] = np.bincount(before, minlength=prepared.footprint)
    row_bytes = RowWiseAdagrad().row_bytes(args.dim)
    return _Trace(prepared, rows, args.batch_size * len(sizes), Geometry.of(row_bytes), row_bytes, popularity)


def _sizes(args: argparse.Namespace, data: str) -> dict[str, None]:
    """Return what to leave out where the data set has its own tables."""
    return {} if data.startswith("synthetic") else {"rows": None, "tables": None}


def _move(
    trace: _Trace, args: argparse.Namespace, hbm: Fraction, read_ahead: Fraction, policy: str
) -> tuple[Ahead, list[Plan]]:
    size = trace.rows * trace.row_bytes
    slots = slots_of(float(hbm * size), trace.row_bytes)
    ahead = automatic(
        trace.prepared, trace.ids, trace.row_bytes, slots, float(read_ahead * size), _MOST_WINDOW
    )
    every = plans(trace.prepared, trace.rows, slots, ahead.window, policy)
    return ahead, list(itertools.islice(every, args.warm_up + args.plans))


def _compare(
    trace: _Trace, moved: tuple[Ahead, list[Plan]], args: argparse.Namespace, ssd: float
) -> dict[str, Any]:
    ahead, moves = moved
    figures = {}
    for name in args.layouts.split(";"):
        log = Log(trace.rows, trace.geometry, ssd, args.gap)
        training = Training(log, LAYOUTS[name], ahead, Knowledge(trace.rows, trace.popularity))
        figures[name] = measure(training, moves, args.warm_up)
        shown = ", ".join(f"{figures[name][k]:,.2f} {k}" for k in _SHOWN)
        print(f"{name}: {shown}", file=sys.stderr, flush=True)
    window, room = (float(np.mean(each)) for each in (ahead.window, ahead.room))
    return {"window": window, "room": room, "rows": trace.rows, "layouts": figures}


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
