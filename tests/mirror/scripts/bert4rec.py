"""A script of torchrec, in the shape of its bert4rec example: sequences of items, an EmbeddingCollection with
Adam in the sharder's fused_params, transformer layers in DDP, and a loop without a pipeline."""

import argparse
import os
from typing import cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel as DMP
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

LENGTH, DIM = 12, 16


class Sequences(nn.Module):
    """Items of a sequence, with attention over them, and a score of every item at each place."""

    def __init__(self, items: int) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item_embedding",
            embedding_dim=DIM,
            num_embeddings=items,
            feature_names=["item"],
            weight_init_max=1.0,
            weight_init_min=-1.0,
        )
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.places = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.scores = nn.Linear(DIM, items)

    def forward(self, sequences: KeyedJaggedTensor) -> torch.Tensor:
        found = self.items(sequences)["item"]
        assert isinstance(found, JaggedTensor)
        rows = found.to_padded_dense(LENGTH)
        return self.scores(self.encoder(rows + self.places.weight))


def batch_of(items: int, generator: torch.Generator) -> KeyedJaggedTensor:
    lengths = torch.randint(1, LENGTH + 1, (8,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, items, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(keys=["item"], values=values, lengths=lengths)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    device = torch.device("cpu")
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(3)
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": args.lr, "weight_decay": 0.0}
    model = DMP(
        module=Sequences(args.items),
        device=device,
        sharders=[cast(ModuleSharder[nn.Module], EmbeddingCollectionSharder(fused))],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=args.lr),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    loss_of = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(50 + rank)
    batches = [batch_of(args.items, generator) for _ in range(2)]
    model.train()
    for step in range(args.steps):
        batch = batches[step % 2].to(device)
        optimizer.zero_grad()
        scores = model(batch)
        targets = batch["item"].to_padded_dense(LENGTH).long()
        loss = loss_of(scores.view(-1, args.items), targets.view(-1))
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
    model.eval()
    with torch.no_grad():
        assert model(batches[0]).shape == (8, LENGTH, args.items)
    state = model.state_dict()
    if rank == 0:
        print(sorted(name for name in state if "item_embedding" in name))
    dist.barrier()


if __name__ == "__main__":
    main()
