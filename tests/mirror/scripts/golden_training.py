"""A script of torchrec, in the shape of its golden training example: DLRM on random data, tables on meta."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


def model_of(rows: int, dim: int, device: torch.device) -> DLRMTrain:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=rows, feature_names=[name])
        for name in DEFAULT_CAT_NAMES
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=len(DEFAULT_INT_NAMES),
        dense_arch_layer_sizes=[16, dim],
        over_arch_layer_sizes=[16, 1],
        dense_device=device,
    )
    return DLRMTrain(dlrm)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--quantized", action="store_true")
    args = parser.parse_args()

    device = torch.device("cpu")
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(1)
    model = model_of(args.rows, args.dim, device)
    tables = model.model.sparse_arch.parameters()
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": args.lr})
    registry = None
    if args.quantized:
        precisions = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
        registry = get_qcomm_codecs_registry(precisions)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    model = DistributedModelParallel(module=model, device=device, sharders=[sharder])

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=args.lr))
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    data = RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=256,
        hash_size=args.rows,
        manual_seed=100 + rank,
        ids_per_feature=1,
        num_dense=len(DEFAULT_INT_NAMES),
        num_generated_batches=16,
    )
    batches = iter(data)
    for step in range(args.steps):
        loss, _, labels = pipeline.progress(batches)
        assert labels.shape == (256,)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
    names = sorted(dense)
    assert not any("embedding_bags" in name for name in names), names
    dist.barrier()


if __name__ == "__main__":
    main()
