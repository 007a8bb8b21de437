"""The parts of ``tierstore bench gpu``.

Each runs in a process of its own and prints, again and again, what it has found so far, as a line of JSON. So
one that is cut short still says something.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ._gpu_live import live
from ._gpu_lookups import made_lookups
from ._gpu_rows import REPEAT, bits, kernels, link, opening
from ._gpu_sizes import Figures, Setting
from ._gpu_training import make_batches, read_batches, train, train_in_hbm
from .planning import add_arguments, measured

_THREADS = (16, 1, 8, 4, 2)
_PLANNING = "--run-in 40 --rounds 3 --steps 8"


@dataclass(frozen=True)
class Part:
    """A part: what it does, the seconds that it may take, how many checks of bits it makes, whether it needs
    the part "batches"."""

    summary: str
    seconds: int
    run: Callable[[Setting], Figures]
    checks: int = 0
    trains: bool = False


def _of_sizes(run: Callable[..., Figures]) -> Callable[[Setting], Figures]:
    return lambda setting: run(setting.sizes)


def planning(setting: Setting) -> Figures:
    """Plan lookups on the host by 1 to 16 threads, the most important numbers first."""
    from tierstore.data import load

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--batch-size", str(setting.sizes.batch_size), *_PLANNING.split()])
    dataset = load("synthetic:criteo", max_rows=setting.sizes.max_rows)
    batches = read_batches(Setting(setting.sizes, setting.folder, "cpu"))
    needed = args.rounds * args.steps + 1
    if len(batches) < needed:
        raise RuntimeError(f"there are {len(batches)} batches, and planning needs {needed}; see --batches")
    args.run_in = min(args.run_in, len(batches) - needed + 1)
    cores = len(os.sched_getaffinity(0))
    yield {"cores": cores}
    for count in (count for count in _THREADS if count <= cores):
        found = measured(args, dataset, (batch.sparse for batch in batches), [count])
        row = found["threads"][str(count)]
        yield {name: found[name] for name in ("ids", "unique_rows", "missed_rows", "evicted_rows", "slots")}
        yield {
            f"{count}_threads.{name}": row[name]
            for name in ("planned_ms", "ids_per_s", "announce_ms", "plan_ms")
        }


OPENING = "open"
PARTS = {
    OPENING: Part("the GPU, its kernels compiled, tables that fit", 30, _of_sizes(opening)),
    "bits": Part("lookups and updates against the CPU's bits", 25, _of_sizes(bits), checks=2 * REPEAT),
    "kernels": Part("gather, pooled lookup and update against a copy", 25, _of_sizes(kernels)),
    "link": Part("rows between hbm and uvm against the link", 25, _of_sizes(link)),
    "batches": Part("batches for the trainings", 40, make_batches),
    "lookups": Part("lookups made by the GPU and by the host", 15, made_lookups, trains=True),
    "hbm": Part("training with all rows in hbm", 40, train_in_hbm, trains=True),
    "uvm": Part("training at 37 times its hbm, with uvm", 55, partial(train, "uvm"), trains=True),
    "planning": Part("plans on the host by threads", 30, planning, trains=True),
    "uvm_ssd": Part(
        "training at 37 times its hbm, with uvm and a store", 65, partial(train, "uvm_ssd"), trains=True
    ),
    "live": Part("moves beside what computes; hits against the simulator's", 35, live, trains=True),
    "embedding_bag": Part("nn.EmbeddingBag on the GPU", 20, partial(train, "embedding_bag"), trains=True),
    "fbgemm": Part("fbgemm's TBE on the GPU", 20, partial(train, "fbgemm"), trains=True),
    "fbgemm_uvm": Part(
        "fbgemm's TBE with a cache of managed memory", 20, partial(train, "fbgemm_uvm"), trains=True
    ),
    "embedding_bag_host": Part(
        "nn.EmbeddingBag on the host", 20, partial(train, "embedding_bag_host"), trains=True
    ),
}


def main(name: str, setting: Setting) -> int:
    """Run a part; print its figures as they come. Return 1 where it fails, and say why in them."""
    figures: dict[str, Any] = {}
    try:
        for found in PARTS[name].run(setting):
            figures.update(found)
            print(json.dumps(figures), flush=True)
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip() or "no message"
        print(json.dumps({**figures, "failed": f"{type(error).__name__}: {said}"}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    from ._gpu_sizes import Sizes

    faulthandler.enable()  # says where a part crashes, or hangs when its time is over
    sys.exit(main(sys.argv[1], Setting(Sizes(**json.loads(sys.argv[2])), Path(sys.argv[3]))))
