"""What rows in fewer bytes cost in AUC: the same training with each form of rows below ``hbm``.

A form is the dtype of the weights, a slash and the dtype of the optimizer's state, such as bf16/fp32. Batches
are the same in every training of a seed. The seed decides the initial weights, and synthetic data. One more
training, of float32 rows, has a learning rate that is larger by a millionth of itself. Its AUC shows by how
much any disturbance, however small, changes the AUC.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from tierstore.result_file import JsonFile

from .._systems import SYSTEMS, Setting, table_configs, tier_bytes
from .._training_arguments import add_training_arguments, load_dataset
from . import Results, main

_FORMS = "bf16/fp32,fp16/fp32,int8/fp32,bf16/bf16"
_NOISE = "fp32 disturbed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    training = add_training_arguments(parser, "flights", batch_size=1024, dim=32)
    training.add_argument("--hbm", default="1/37", metavar="SIZE", help="bytes, or a fraction of the tables'")
    training.add_argument("--forms", default=_FORMS, metavar="A,B", help=f"(default: {_FORMS})")
    training.add_argument(
        "--roundings", default="stochastic", metavar="A,B", help="stochastic (default), nearest"
    )
    training.add_argument("--epochs", type=int, default=1, metavar="N")
    training.add_argument("--steps", type=int, metavar="N", help="batches of a training (default: all)")
    training.add_argument("--seeds", type=int, default=3, metavar="N", help="trainings of each (default: 3)")


def run(args: argparse.Namespace, _: JsonFile | None) -> Results:
    found: dict[str, list[float]] = {}
    for seed in range(args.seed, args.seed + args.seeds):
        for name, auc, rounded in _trained(args, seed):
            found.setdefault(name, []).append(auc)
            print(f"seed {seed}, {name}: AUC {auc:.5f}; {rounded:.2f} rows stored per step", file=sys.stderr)
    base = found["fp32"]
    figures = {"fp32.auc": sum(base) / len(base)}
    for name, aucs in found.items():
        if name != "fp32":
            differences = [auc - other for auc, other in zip(aucs, base, strict=True)]
            figures[f"{name}.difference"] = sum(differences) / len(differences)
            figures[f"{name}.worst"] = max(map(abs, differences))
    return figures, {"auc": found}


def _trained(args: argparse.Namespace, seed: int) -> Iterator[tuple[str, float, float]]:
    """Yield form, AUC and rows written to the store in a step, of each training with this seed."""
    dataset = load_dataset(argparse.Namespace(**{**vars(args), "seed": seed}))
    tables = table_configs(dataset, args.dim)
    wide = Setting(tables, dataset.dense_dim, args.lr, seed, tier_bytes(args.hbm, tables))
    settings = {"fp32": wide, _NOISE: replace(wide, lr=args.lr * (1 + 1e-6))}
    for form in args.forms.split(","):
        weights, state = form.split("/")
        for rounding in args.roundings.split(","):
            settings[f"{form} {rounding}"] = replace(
                wide, ssd_dtype=weights, state_dtype=state, stochastic_rounding=rounding == "stochastic"
            )
    batches = list(islice(dataset.train(args.batch_size, epochs=args.epochs), args.steps))
    for name, setting in settings.items():
        system = SYSTEMS["tiered"](setting)
        try:
            system.train(batches)
            written: Any = system.embeddings.stats()  # type: ignore[operator]
            rows = written["store"]["written_rows"] / len(batches)
            yield name, system.auc(dataset.test(args.batch_size)), rows
        finally:
            system.close()


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
