"""``tierstore train``: trains a DLRM whose tables exceed their memory budget, and can check every bit."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

EPILOG = """\
data sets: flights | movielens | criteo (needs --data-path) |
  synthetic:zipf:S | synthetic:criteo | synthetic:meta2021
sizes: bytes, or 64MiB, 1.5GiB; --hbm also takes a fraction of the tables' bytes
  (1/37, 2.7%) or all; --read-ahead also takes such a fraction
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a DLRM with tables larger than memory",
        description="Train a DLRM whose embedding tables live in tiers; report its speed and quality.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_data(parser.add_argument_group("data"))
    _add_tiers(parser.add_argument_group("tiers"))
    _add_training(parser.add_argument_group("training"))
    _add_output(parser.add_argument_group("result"))
    return parser


def _add_data(group: Any) -> None:
    group.add_argument("--data", default="flights", metavar="NAME", help="data set (default: flights)")
    group.add_argument("--data-path", type=Path, metavar="PATH", help="file or folder of the data set")
    group.add_argument("--rows", type=int, metavar="N", help="synthetic: rows per table")
    group.add_argument("--tables", type=int, metavar="N", help="synthetic: number of tables")
    group.add_argument(
        "--max-rows", type=int, metavar="N", help="synthetic:criteo: cap of the rows per table"
    )


def _add_tiers(group: Any) -> None:
    group.add_argument(
        "--plan",
        type=Path,
        metavar="JSON",
        help="train sharded by a plan of tierstore plan, on the ranks that torchrun starts; the plan has the "
        "budgets of every rank",
    )
    group.add_argument("--hbm", default="64MiB", metavar="SIZE", help="fast memory (default: 64MiB)")
    group.add_argument("--uvm", default="0", metavar="SIZE", help="host memory under hbm (default: 0)")
    group.add_argument(
        "--store",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folder of the row store, or one on each of several devices (default: in --checkpoint DIR, else "
        "a temporary one)",
    )
    group.add_argument(
        "--ssd",
        default="auto",
        metavar="SIZE",
        help="cap of the store's files (default: the size of the disk, up to 1TiB); 0 for no store",
    )
    group.add_argument(
        "--engine", default="native", metavar="NAME", help="row store: native, rocksdb, lmdb, memory"
    )
    group.add_argument(
        "--policy",
        default="lookahead",
        metavar="NAME",
        help="eviction policy, or module:Class of your own (default: lookahead)",
    )
    group.add_argument(
        "--admission",
        default="always",
        metavar="NAME",
        help="which missed rows get a slot: always (default), counter(N) or bloom(N)",
    )
    group.add_argument(
        "--depth", type=_count_or_auto, default="auto", metavar="K", help="batches fetched ahead"
    )
    group.add_argument(
        "--window", type=_count_or_auto, default="auto", metavar="W", help="batches looked at ahead"
    )
    group.add_argument(
        "--read-ahead",
        default="auto",
        metavar="SIZE",
        help="memory beside the budget for rows read ahead of their batches (default: auto, up to an eighth "
        "of the tables and 1/64 of this machine's memory); 0 for none",
    )
    for tier in ("ssd", "uvm"):
        group.add_argument(
            f"--{tier}-dtype",
            default="fp32",
            metavar="NAME",
            help=f"how weights are held in {tier}: fp32 (default), bf16, fp16 or int8",
        )
    group.add_argument(
        "--state-dtype",
        default="fp32",
        metavar="NAME",
        help="how optimizer state is held there: fp32 (default) or bf16",
    )
    group.add_argument(
        "--rounding",
        choices=["stochastic", "nearest"],
        default="stochastic",
        help="how rows are rounded that go there (default: stochastic)",
    )
    group.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="threads to compute with (default: the cores but one, which prefetch uses)",
    )


def _add_training(group: Any) -> None:
    group.add_argument(
        "--epochs", type=_positive, default=1, metavar="N", help="passes over the data (default: 1)"
    )
    group.add_argument("--steps", type=_positive, metavar="N", help="stop after N batches")
    group.add_argument(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="examples per step, with --plan of each rank (default: 1024, or the plan's)",
    )
    group.add_argument(
        "--dim", type=_positive, default=32, metavar="D", help="embedding dimension (default: 32)"
    )
    group.add_argument(
        "--optimizer",
        default="rowwise-adagrad",
        metavar="NAME",
        help="optimizer of the rows: sgd, momentum-sgd, lars-sgd, adagrad, rowwise-adagrad (default), adam, "
        "adamw, partial-rowwise-adam, lamb or partial-rowwise-lamb",
    )
    group.add_argument("--lr", type=float, default=0.02, metavar="X", help="learning rate (default: 0.02)")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of data and initial values (default: 0)"
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save the run there, rows included (default: in --store DIR at the end)",
    )
    group.add_argument(
        "--checkpoint-every", type=_positive, metavar="N", help="save after every N batches too"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint; start anew where there is none yet",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--compare",
        choices=["in-memory"],
        help="train again all in memory, and compare every bit where no tier rounds rows",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    group.add_argument(
        "--save-curves",
        type=Path,
        metavar="FILE",
        help="write the tables' miss-ratio curves for tierstore plan",
    )
    group.add_argument(
        "--record", type=Path, metavar="FILE.npz", help="write the trace of the batches trained on"
    )
    group.add_argument(
        "--record-rate",
        type=float,
        default=1.0,
        metavar="R",
        help="share of the rows that --record keeps, by a hash (default: 1)",
    )
    group.add_argument("--tensorboard", type=Path, metavar="DIR", help="write scalars for TensorBoard there")
    group.add_argument(
        "--tensorboard-every",
        type=_positive,
        default=100,
        metavar="N",
        help="write them after every N batches, and at the end (default: 100)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _count_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor 'auto'")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from tierstore.cli.experiment import Experiment
    from tierstore.cli.planned import planned_ranks
    from tierstore.cli.ranks import leave

    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if args.plan else 1
    args.threads = args.threads or max(1, len(os.sched_getaffinity(0)) // local - 1)
    ranks, plan = planned_ranks(args)
    args.batch_size = args.batch_size or (plan and plan.batch_size) or 1024
    code = Experiment(args, ranks, plan).run()
    leave(ranks)
    return code
