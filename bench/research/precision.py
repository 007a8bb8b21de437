"""What rows in fewer bytes cost in AUC: the same training with each form of rows below ``hbm``.

A form is the dtype of the weights, a slash and the dtype of the optimizer's state, such as bf16/fp32. Batches
are the same in every training of a seed. The seed decides the initial weights, and synthetic data. One more
training, of float32 rows, has a learning rate that is larger by a thousandth of itself. Its AUC shows by how
much any disturbance of about bf16's precision changes the AUC.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from statistics import fmean

import torch

import tierstore
from tierstore.data import Batch
from tierstore.result_file import JsonFile

from .._systems import SYSTEMS, Setting, System, table_configs, tier_bytes
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
    if args.threads:
        torch.set_num_threads(args.threads)
        tierstore.set_num_threads(args.threads)
    aucs: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for seed in range(args.seed, args.seed + args.seeds):
        for name, system, test in _trained(args, seed):
            aucs.setdefault(name, []).append(system.auc(test))
            losses.setdefault(name, []).append(fmean(system.losses))
            auc, loss = aucs[name][-1], losses[name][-1]
            print(f"seed {seed}, {name}: AUC {auc:.5f}, mean loss {loss:.6f}", file=sys.stderr, flush=True)
    figures = {"fp32.auc": fmean(aucs["fp32"]), "fp32.mean_loss": fmean(losses["fp32"])}
    for name in aucs:
        if name != "fp32":
            differences = [one - other for one, other in zip(aucs[name], aucs["fp32"], strict=True)]
            figures[f"{name}.auc_difference"] = fmean(differences)
            figures[f"{name}.auc_worst"] = max(map(abs, differences))
            figures[f"{name}.loss_difference"] = fmean(losses[name]) - fmean(losses["fp32"])
    return figures, {"auc": aucs, "mean_loss": losses}


def _trained(args: argparse.Namespace, seed: int) -> Iterator[tuple[str, System, Iterator[Batch]]]:
    """Yield the form and the trained system of each training with this seed, and examples to test it with."""
    dataset = load_dataset(argparse.Namespace(**{**vars(args), "seed": seed}))
    tables = table_configs(dataset, args.dim)
    wide = Setting(tables, dataset.dense_dim, args.lr, seed, tier_bytes(args.hbm, tables))
    settings = {"fp32": wide, _NOISE: replace(wide, lr=args.lr * 1.001)}
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
            yield name, system, dataset.test(args.batch_size)
        finally:
            system.close()


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
