"""A script of torchrec, in the shape of torchrec_dlrm's dlrm_main.py: three interactions, planned, with
validation, a schedule for the learning rate, and random data."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

KINDS = {
    "original": (DLRM, {}),
    "dcn": (DLRM_DCN, {"dcn_num_layers": 2, "dcn_low_rank_dim": 8}),
    "projection": (
        DLRM_Projection,
        {"interaction_branch1_layer_sizes": [16], "interaction_branch2_layer_sizes": [16]},
    ),
}


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Reaches the learning rate after some steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self) -> list:
        share = min(1.0, (self._step_count + 1) / self.steps)
        return [base * share for base in self.base_lrs]


def loader(rows: int, seed: int) -> DataLoader:
    data = RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=16,
        hash_size=rows,
        manual_seed=seed,
        ids_per_feature=1,
        num_dense=len(DEFAULT_INT_NAMES),
        num_generated_batches=3,
    )
    return DataLoader(data, batch_size=None, batch_sampler=None, num_workers=0)


def evaluate(pipeline: TrainPipelineSparseDist, batches: DataLoader, limit: int) -> int:
    pipeline._model.eval()
    iterator, seen = itertools.islice(iter(batches), limit), 0
    with torch.no_grad():
        while True:
            try:
                _loss, logits, labels = pipeline.progress(iterator)
            except StopIteration:
                return seen
            assert torch.sigmoid(logits).shape == labels.shape
            assert not logits.requires_grad
            seen += len(labels)


def train(args: argparse.Namespace, kind: str, device: torch.device) -> None:
    rank = dist.get_rank()
    tables = [
        EmbeddingBagConfig(name=f"t_{n}", embedding_dim=args.dim, num_embeddings=args.rows, feature_names=[n])
        for n in DEFAULT_CAT_NAMES
    ]
    torch.manual_seed(2)
    make, options = KINDS[kind]
    model = DLRMTrain(
        make(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=len(DEFAULT_INT_NAMES),
            dense_arch_layer_sizes=[16, args.dim],
            over_arch_layer_sizes=[16, 1],
            dense_device=device,
            **options,
        )
    )
    kind_of_optimizer = torch.optim.Adagrad if args.adagrad else torch.optim.SGD
    apply_optimizer_in_backward(kind_of_optimizer, model.model.sparse_arch.parameters(), {"lr": args.lr})
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device=device.type
        ),
        batch_size=16,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=device, plan=plan)
    if rank == 0:
        for path, placed in model._plan.plan.items():
            print(kind, path, len(placed), "tables are planned")
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: kind_of_optimizer(params, lr=args.lr),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    schedule = WarmUp(optimizer, 4)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    validation = TrainPipelineSparseDist(model, optimizer, device)
    held_out = loader(args.rows, 900 + rank)
    model.train()
    iterator = itertools.islice(iter(loader(args.rows, 100 + rank)), args.steps)
    for step in itertools.count(1):
        try:
            loss, _logits, _labels = pipeline.progress(iterator)
        except StopIteration:
            break
        schedule.step()
        rates = {round(group["lr"], 6) for group in pipeline._optimizer.param_groups}
        if rank == 0:
            print(f"{kind} step {step} loss {loss.item():.9g} lr {sorted(rates)}", flush=True)
        if step == args.steps // 2:
            assert evaluate(validation, held_out, 3) == 48
            model.train()
    assert step == args.steps + 1
    assert evaluate(validation, held_out, 2) == 32
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interactions", nargs="+", default=list(KINDS))
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--adagrad", action="store_true")
    args = parser.parse_args()
    assert int(os.environ["LOCAL_RANK"]) >= 0
    dist.init_process_group(backend="gloo")
    for kind in args.interactions:
        train(args, kind, torch.device("cpu"))


if __name__ == "__main__":
    main()
