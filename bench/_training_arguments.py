"""The arguments of benchmarks that train a model on a data set."""

from __future__ import annotations

import argparse
from typing import Any


def add_training_arguments(parser: argparse.ArgumentParser, data: str, batch_size: int, dim: int) -> Any:
    """Add a data set, ``data`` by default, and the settings of training. Return the group of the settings."""
    group = parser.add_argument_group("data")
    group.add_argument("--data", default=data, metavar="NAME", help=f"data set (default: {data})")
    group.add_argument("--data-path", metavar="PATH", help="file or folder of the data set")
    group.add_argument("--rows", type=int, metavar="N", help="synthetic: rows per table")
    group.add_argument("--tables", type=int, metavar="N", help="synthetic: number of tables")
    group.add_argument("--max-rows", type=int, metavar="N", help="synthetic:criteo, criteo: cap of the rows")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch-size",
        type=int,
        default=batch_size,
        metavar="N",
        help=f"examples per step (default: {batch_size})",
    )
    training.add_argument(
        "--dim", type=int, default=dim, metavar="D", help=f"embedding dimension (default: {dim})"
    )
    training.add_argument("--lr", type=float, default=0.02, metavar="X", help="learning rate (default: 0.02)")
    training.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of data and initial values (default: 0)"
    )
    training.add_argument("--threads", type=int, metavar="N", help="threads to compute with")
    return training


def add_dtypes(group: Any) -> None:
    """Add the dtypes of the store's rows."""
    group.add_argument(
        "--ssd-dtype",
        default="fp32",
        metavar="A,B",
        help="how the store holds weights: fp32 (default), bf16, fp16, int8; each is trained by itself",
    )
    group.add_argument(
        "--state-dtype",
        default="fp32",
        metavar="NAME",
        help="how the store holds optimizer state: fp32 (default), bf16",
    )


def load_dataset(args: argparse.Namespace) -> Any:
    """Return the data set that the arguments name."""
    from tierstore import data

    return data.load(
        args.data,
        path=args.data_path,
        seed=args.seed,
        rows=args.rows,
        tables=args.tables,
        max_rows=args.max_rows,
    )
