"""Train a DLRM with Lightning: its checkpoints and the rows of the tables are one unit.

python examples/with_lightning.py --steps 60
python examples/with_lightning.py --steps 120      (goes on at the last checkpoint)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import tierstore
from tierstore import EmbeddingBagConfig
from tierstore.data import Dataset, load
from tierstore.integrations.lightning import TierStoreCallback
from tierstore.models import DLRM, DLRMTrain

EXAMPLES = 100_000  # of an epoch


class Module(LightningModule):
    """A DLRM over tables in tiers."""

    def __init__(self, data: Dataset, folder: Path, hbm: str) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(table.num_embeddings, 16, table.name) for table in data.tables]
        config = tierstore.TierConfig(hbm=hbm, ssd="4GiB", path=folder / "rows")
        self.bags = tierstore.EmbeddingBagCollection(
            tables, config=config, optimizer=tierstore.optim.Adagrad(lr=0.05)
        )
        torch.manual_seed(1)
        self.train_module = DLRMTrain(DLRM(self.bags, data.dense_dim, [32, 16], [32, 1]))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss, _ = self.train_module(batch)
        if self.global_step % 20 == 0:
            print(f"step {self.global_step}  loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.002)  # of the dense parameters: tables have their own


class Batches(torch.utils.data.IterableDataset):
    """The batches of a dataset of tierstore, which are whole already."""

    def __init__(self, data: Dataset, batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size

    def __iter__(self) -> Any:
        return self.data.train(self.batch_size)

    def __len__(self) -> int:
        """Without a length Lightning pulls one batch ahead, and a resumed run would leave that batch out."""
        return -(-EXAMPLES // self.batch_size)


def main() -> None:
    args = arguments()
    args.folder.mkdir(exist_ok=True)
    data = load("synthetic:zipf:1.05", tables=4, rows=args.rows, examples=EXAMPLES)
    module = Module(data, args.folder, args.hbm)
    loader = torch.utils.data.DataLoader(
        Batches(data, args.batch_size), batch_size=None, generator=torch.Generator().manual_seed(2)
    )
    saves = ModelCheckpoint(args.folder / "checkpoints", every_n_train_steps=20, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[TierStoreCallback(), saves],
        max_steps=args.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = args.folder / "checkpoints/last.ckpt"
    trainer.fit(module, tierstore.prefetch(loader, module), ckpt_path=last if last.exists() else None)
    print(f"trained to step {trainer.global_step}")
    module.bags.close(commit=False)  # the last checkpoint has everything


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rows", type=int, default=200_000, help="of each of the 4 tables")
    parser.add_argument("--hbm", default="4MiB", help="budget of the fast tier (default: 4MiB)")
    parser.add_argument("--folder", type=Path, default=Path("lightning-run"), help="of rows and checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
