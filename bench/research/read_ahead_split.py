"""Compare the division that ``read_ahead="auto"`` recommends with the best of many, by simulation.

Some bytes are divided between reading ahead and the cache, in every way. Trainings with each division are
simulated as :mod:`.layout` does, with every row written: the misses are the policy's, and the requests are
those of the real horizon on a log with compaction. The choice is made by the code of the runtime, which knows
one training only: with nothing but the cache, and reading ahead at its largest.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np

from cache_policies.live import LiveCurves, starts_of
from tierstore.cache.read_ahead_size import Bytes, KnownAhead, ReadAheadSize
from tierstore.planner.costs import BYTES_PER_BAG, BYTES_PER_ID, HELD_BYTES_PER_ROW, slot_bytes
from tierstore.result_file import JsonFile
from tierstore.rounds import WINDOW_BYTES, record_bytes

from . import Results, main
from .layout import _MOST_WINDOW, LAYOUTS, Knowledge, Training, add_arguments, draw, measure
from .layout_log import Log
from .layout_trace import Plan, automatic, plans

_SIZES = 9  # each the next one's over the square root of 2


@dataclass
class _Window:
    lookups: int
    distinct_rows: int


@dataclass
class _Group:
    name: str
    window: _Window
    curves: LiveCurves


def run(args: argparse.Namespace, target: JsonFile | None) -> Results:
    cases: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}
    for data in args.data.split(","):
        trace = draw(args, data)
        every = trace.rows * trace.row_bytes
        for hbm in args.hbm.split(","):
            for most in args.read_ahead.split(","):
                budget, size = float(Fraction(hbm) * every), int(Fraction(most) * every)
                case = _case(trace, args, budget, size)
                name = f"{data}, hbm {hbm}, {most} to divide"
                cases[name], ratios[name] = case, case["chosen_cost"] / case["best_cost"]
                print(f"{name}: {case}", file=sys.stderr, flush=True)
                if target is not None:
                    target.write({"cases": cases})
    return ratios, {"options": {k: str(v) for k, v in vars(args).items()}, "cases": cases}


def _case(trace: Any, args: argparse.Namespace, budget: float, most: int) -> dict[str, Any]:
    slot = slot_bytes(trace.row_bytes)
    sizes = [int(most / 2 ** (i / 2)) for i in range(_SIZES)]
    moved = {size: _simulated(trace, args, int((budget + most - size) / slot), size) for size in sizes}
    costs = {size: figures["requests"] * args.gap + figures["bytes"] for size, (figures, _) in moved.items()}
    chosen = _choice(trace, args, int(budget / slot), most, moved[most][1])
    if chosen not in costs:
        figures, _ = _simulated(trace, args, int((budget + most - chosen) / slot), chosen)
        costs[chosen] = figures["requests"] * args.gap + figures["bytes"]
    best = min(costs, key=costs.__getitem__)
    return {
        "most": most,
        "chosen": chosen,
        "best": best,
        "chosen_cost": costs[chosen],
        "best_cost": costs[best],
        "costs": {str(size): cost for size, cost in costs.items()},
        "requests": {str(size): figures["requests"] for size, (figures, _) in moved.items()},
        "misses": {str(size): figures["misses"] for size, (figures, _) in moved.items()},
    }


def _simulated(
    trace: Any, args: argparse.Namespace, slots: int, size: int
) -> tuple[dict[str, float], list[Plan]]:
    ahead = automatic(trace.prepared, trace.ids, trace.row_bytes, slots, size, _MOST_WINDOW)
    every = plans(trace.prepared, trace.rows, slots, ahead.window, args.policy)
    moves = list(islice(every, args.warm_up + args.plans))
    log = Log(trace.rows, trace.geometry, float(args.ssd), args.gap)
    training = Training(log, LAYOUTS["today"], ahead, Knowledge(trace.rows, trace.popularity))
    return measure(training, moves, args.warm_up), moves


def _choice(trace: Any, args: argparse.Namespace, slots: int, most: int, moves: list[Plan]) -> int:
    """Return the bytes that the runtime recommends when it has trained for so long."""
    prepared, curves = trace.prepared, LiveCurves([0])
    for seq in range(len(moves)):
        part = slice(prepared.offsets[seq], prepared.offsets[seq + 1])
        curves.observe(prepared.keys[prepared.rows[part]].astype(np.uint64), starts_of(prepared.uses[part]))
    ahead = automatic(prepared, trace.ids, trace.row_bytes, slots, most, _MOST_WINDOW)
    seq = len(moves) - 1
    end = seq + int(ahead.window[seq]) + 1  # type: ignore[index]
    distinct = len(np.unique(prepared.rows[prepared.offsets[seq] : prepared.offsets[end]]))
    held = trace.row_bytes + HELD_BYTES_PER_ROW
    sizes = Bytes(most, slot_bytes(trace.row_bytes), held, record_bytes(trace.row_bytes))
    rule = ReadAheadSize([(0, trace.rows)], slots, sizes)
    rule.known = KnownAhead(None, trace.ids * (BYTES_PER_ID + BYTES_PER_BAG), WINDOW_BYTES)
    group = _Group("simulated", _Window(end - seq, distinct), curves)
    for plan in moves:
        rule.lookup_done(group, len(plan.misses))  # type: ignore[arg-type]
    return most if rule.split is None else rule.split


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
