from __future__ import annotations

import pytest
import torch
from torchrec.models.dlrm import DLRM as TorchRecDLRM
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig as TorchRecConfig
from torchrec.modules.embedding_configs import PoolingType as TorchRecPooling
from torchrec.modules.embedding_modules import EmbeddingBagCollection as TorchRecCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as TorchRecKJT

from tierstore.data import load
from tierstore.errors import ConfigError
from tierstore.models import DLRM, DCNv2, DenseEmbeddingBags, DLRMTrain
from tierstore.modules.configs import EmbeddingBagConfig, PoolingType
from tierstore.sparse import KeyedJaggedTensor

DIM = 6


def configs(dims=(DIM, DIM, DIM), shared=True) -> list[EmbeddingBagConfig]:
    """Three tables; torchrec's models do not know features that two tables share."""
    return [
        EmbeddingBagConfig(40, dims[0], "t0", feature_names=["f0"]),
        EmbeddingBagConfig(
            30, dims[1], "t1", feature_names=["f1", "f2"] if shared else ["f1"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(20, dims[2], "t2", feature_names=["f2"]),
    ]


def torchrec_collection(ours: DenseEmbeddingBags) -> TorchRecCollection:
    tables = [
        TorchRecConfig(
            num_embeddings=c.num_embeddings,
            embedding_dim=c.embedding_dim,
            name=c.name,
            feature_names=c.feature_names,
            pooling=TorchRecPooling[c.pooling.value],
        )
        for c in ours.embedding_bag_configs()
    ]
    collection = TorchRecCollection(tables=tables)
    collection.load_state_dict(ours.state_dict())
    return collection


def features(batch: int = 5):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (3 * batch,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(batch, 4, generator=generator)
    keys = ["f0", "f1", "f2"]
    return dense, KeyedJaggedTensor(keys, values, lengths=lengths), TorchRecKJT(keys, values, lengths=lengths)


def copy_dense(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """The dense parameters in the order of the layers, which both models share."""
    for part in ("dense_arch", "inter_arch", "over_arch"):
        a, b = list(getattr(ours, part).parameters()), list(getattr(theirs, part).parameters())
        assert [p.shape for p in a] == [p.shape for p in b]
        with torch.no_grad():
            for p, q in zip(a, b, strict=True):
                q.copy_(p)


def test_reference_collection_equals_torchrec():
    ours = DenseEmbeddingBags(configs((4, 6, 3)))
    _, kjt, torchrec_kjt = features()
    theirs = torchrec_collection(ours)
    a, b = ours(kjt), theirs(torchrec_kjt)
    assert a.keys() == b.keys()
    assert a.length_per_key() == b.length_per_key()
    torch.testing.assert_close(a.values(), b.values())


@pytest.mark.parametrize("sparse", [False, True])
def test_reference_gradients(sparse):
    ours = DenseEmbeddingBags(configs(), sparse=sparse)
    ours(features()[1]).values().sum().backward()
    for table in ours.embedding_bags.values():
        assert table.weight.grad.is_sparse == sparse


def test_reference_initial_values_and_rows():
    (config,) = [EmbeddingBagConfig(1000, 8, "t", weight_init_min=-0.5, weight_init_max=0.25)]
    bags = DenseEmbeddingBags([config])
    weight = bags.embedding_bags["t"].weight
    assert -0.5 <= weight.min() < -0.45 < 0.2 < weight.max() <= 0.25
    bags.load_rows("t", torch.tensor([7, 3]), torch.stack([torch.ones(8), torch.zeros(8)]))
    assert weight[7].tolist() == [1.0] * 8
    assert weight[3].tolist() == [0.0] * 8
    with pytest.raises(ConfigError, match="two tables"):
        DenseEmbeddingBags([config, config])


def test_dlrm_equals_torchrec():
    collection = DenseEmbeddingBags(configs(shared=False))
    dense, kjt, torchrec_kjt = features()
    ours = DLRM(collection, 4, [8, DIM], [7, 5, 1])
    theirs = TorchRecDLRM(torchrec_collection(collection), 4, [8, DIM], [7, 5, 1])
    copy_dense(ours, theirs)
    logits = ours(dense, kjt)
    assert logits.shape == (5, 1)
    torch.testing.assert_close(logits, theirs(dense, torchrec_kjt))


def test_dlrm_takes_torchrec_collections():
    collection = DenseEmbeddingBags(configs())
    dense, kjt, torchrec_kjt = features()
    ours = DLRM(collection, 4, [DIM], [1])
    over_theirs = DLRM(torchrec_collection(collection), 4, [DIM], [1])
    copy_dense(ours, over_theirs)
    torch.testing.assert_close(ours(dense, kjt), over_theirs(dense, torchrec_kjt))


def test_dcn_equals_torchrec():
    collection = DenseEmbeddingBags(configs(shared=False))
    dense, kjt, torchrec_kjt = features()
    ours = DCNv2(collection, 4, [8, DIM], [7, 1], dcn_num_layers=2, dcn_low_rank_dim=3)
    theirs = DLRM_DCN(
        torchrec_collection(collection), 4, [8, DIM], [7, 1], dcn_num_layers=2, dcn_low_rank_dim=3
    )
    for part in ("dense_arch", "over_arch"):
        for p, q in zip(getattr(ours, part).parameters(), getattr(theirs, part).parameters(), strict=True):
            q.data.copy_(p.data)
    cross = theirs.inter_arch.crossnet
    for layer in range(2):
        torch.nn.init.normal_(ours.inter_arch.up[layer].bias)
        cross.V_kernels[layer].data.copy_(ours.inter_arch.down[layer].weight.data)
        cross.W_kernels[layer].data.copy_(ours.inter_arch.up[layer].weight.data)
        cross.bias[layer].data.copy_(ours.inter_arch.up[layer].bias.data.view_as(cross.bias[layer]))
    torch.testing.assert_close(ours(dense, kjt), theirs(dense, torchrec_kjt))


def test_dcn_takes_dims_that_differ():
    dense, kjt, _ = features()
    model = DCNv2(DenseEmbeddingBags(configs((4, 6, 3))), 4, [5], [1], 1, 2)
    assert model(dense, kjt).shape == (5, 1)


def test_dense_weights_follow_the_seed():
    def weights() -> list[torch.Tensor]:
        collection = DenseEmbeddingBags(configs())
        torch.manual_seed(11)
        return [
            p for name, p in DLRM(collection, 4, [DIM], [3, 1]).named_parameters() if "embedding" not in name
        ]

    for a, b in zip(weights(), weights(), strict=True):
        assert torch.equal(a, b)


def test_training_wrapper_learns():
    data = load("synthetic:zipf:1.1", tables=3, rows=100)
    tables = [EmbeddingBagConfig(100, 4, table.name) for table in data.tables]
    torch.manual_seed(0)
    model = DLRMTrain(DLRM(DenseEmbeddingBags(tables), data.dense_dim, [8, 4], [8, 1]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for _, batch in zip(range(60), data.train(512), strict=False):
        loss, (detached, logits, labels) = model(batch)
        assert logits.shape == labels.shape == (512,)
        assert not detached.requires_grad
        assert not logits.requires_grad
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < losses[0] - 0.05


def test_wrong_shapes_are_refused():
    with pytest.raises(ConfigError, match="one embedding_dim"):
        DLRM(DenseEmbeddingBags(configs((4, 6, 6))), 4, [6], [1])
    with pytest.raises(ConfigError, match="must end with the embedding_dim 6"):
        DLRM(DenseEmbeddingBags(configs()), 4, [8], [1])
    with pytest.raises(ConfigError, match="size of the output"):
        DLRM(DenseEmbeddingBags(configs()), 4, [6], [])
    with pytest.raises(ConfigError, match="layers and rank"):
        DCNv2(DenseEmbeddingBags(configs()), 4, [6], [1], 0, 1)
    with pytest.raises(ConfigError, match="no tables"):
        DLRM(DenseEmbeddingBags([]), 4, [6], [1])
