"""Table configurations: torchrec's fields and defaults, and refusals of what cannot be honoured."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import init
from torchrec.modules import embedding_configs as peer

from tierstore.errors import ConfigError
from tierstore.modules import TieredEmbedding
from tierstore.modules.configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    from_torchrec,
)


@pytest.mark.parametrize("name", ["EmbeddingBagConfig", "EmbeddingConfig"])
def test_fields_order_and_defaults_are_torchrecs(name: str) -> None:
    ours = {"EmbeddingBagConfig": EmbeddingBagConfig, "EmbeddingConfig": EmbeddingConfig}[name]
    theirs = getattr(peer, name)
    assert [item.name for item in fields(ours)] == [item.name for item in fields(theirs)]
    mine, other = ours(10, 4), theirs(10, 4)
    for item in fields(ours):
        value, expected = getattr(mine, item.name), getattr(other, item.name)
        if item.name != "init_fn":
            assert getattr(value, "value", value) == getattr(expected, "value", expected)
    assert mine.get_weight_init_min() == other.get_weight_init_min()
    assert mine.get_weight_init_max() == other.get_weight_init_max()
    assert ours(10, 4, weight_init_max=2.0).get_weight_init_max() == 2.0
    assert mine.num_features() == other.num_features() == 0


def test_enums_have_torchrecs_members() -> None:
    assert {member.value for member in peer.DataType} == {member.value for member in DataType}
    assert {member.value for member in peer.PoolingType} | {"MAX"} == {member.value for member in PoolingType}
    assert str(DataType.BF16) == str(peer.DataType.BF16)


def test_feature_names_default_to_the_name() -> None:
    assert EmbeddingBagConfig(10, 4, "t").feature_names == ["t"]
    assert EmbeddingBagConfig(10, 4, "t", feature_names=["f", "g"]).num_features() == 2


@pytest.mark.parametrize(
    ("init_fn", "rule"),
    [
        (None, ("uniform", -0.5, 0.5)),
        (init.uniform_, ("uniform", 0.0, 1.0)),
        (partial(init.uniform_, a=-2.0, b=3.0), ("uniform", -2.0, 3.0)),
        (partial(init.uniform_, b=3.0), ("uniform", 0.0, 3.0)),
        (init.normal_, ("normal", 0.0, 1.0)),
        (partial(init.normal_, std=0.01), ("normal", 0.0, 0.01)),
        (partial(init.constant_, val=7), ("constant", 7.0, 0.0)),
        (init.zeros_, ("constant", 0.0, 0.0)),
        (init.ones_, ("constant", 1.0, 0.0)),
    ],
)
def test_initial_values(init_fn: object, rule: tuple[str, float, float]) -> None:
    assert EmbeddingConfig(4, 4, "t", init_fn=init_fn).init_rule() == rule


@pytest.mark.parametrize(
    "init_fn",
    [
        lambda weight: weight.fill_(1),
        init.xavier_uniform_,
        init.constant_,
        partial(init.uniform_, torch.empty(3)),
        partial(init.uniform_, a=0.0, b=1.0, generator=None),
    ],
)
def test_other_initialisers_are_refused(init_fn: object) -> None:
    with pytest.raises(ConfigError, match=r"table 't': init_fn .* cannot be honoured.*load_rows"):
        EmbeddingConfig(4, 4, "t", init_fn=init_fn)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_embeddings", 0, "num_embeddings is 0; it must be an integer from 1 to 2\\*\\*48"),
        ("num_embeddings", 2**48 + 1, "from 1 to 2"),
        ("num_embeddings", 3.0, "num_embeddings is 3.0"),
        ("embedding_dim", -1, "embedding_dim is -1; it must be a positive integer"),
        ("embedding_dim", True, "embedding_dim is True"),
        ("data_type", DataType.INT8, "tables that are trained have"),
        ("feature_names", ["a", "a"], "different names"),
        ("feature_names", "ab", "different names"),
        ("num_embeddings_post_pruning", 3, "not pruned"),
        ("need_pos", True, "pass weights in the KeyedJaggedTensor"),
        ("input_dim", 3, "not remapped"),
        ("total_num_buckets", 2, "buckets"),
        ("virtual_table_eviction_policy", peer.NoEvictionPolicy(), "rows are never dropped"),
        ("enable_embedding_update", True, "load_rows"),
        ("stash_weights", True, "TierConfig says where"),
        ("pooling", PoolingType.NONE, "use PoolingType.SUM, MEAN or MAX"),
        ("pooling", "sum", "pooling is 'sum'"),
        ("weight_init_min", 5.0, "weight_init_min 5.0 is above weight_init_max"),
    ],
)
def test_what_cannot_be_honoured_is_refused(field: str, value: object, message: str) -> None:
    arguments = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", field: value}
    with pytest.raises(ConfigError, match=f"table 't': .*{message}"):
        EmbeddingBagConfig(**arguments)


def test_bounds_and_init_fn_exclude_one_another() -> None:
    with pytest.raises(ConfigError, match="either init_fn or weight_init_min"):
        EmbeddingConfig(10, 4, "t", weight_init_max=1.0, init_fn=init.zeros_)


def test_from_torchrec() -> None:
    theirs = peer.EmbeddingBagConfig(10, 4, "t", feature_names=["f"], pooling=peer.PoolingType.MEAN)
    assert from_torchrec(theirs) == EmbeddingBagConfig(
        10, 4, "t", feature_names=["f"], pooling=PoolingType.MEAN
    )
    bounded = from_torchrec(peer.EmbeddingConfig(10, 4, "t", weight_init_min=-3.0, weight_init_max=3.0))
    assert bounded == EmbeddingConfig(10, 4, "t", weight_init_min=-3.0, weight_init_max=3.0)
    zeros = from_torchrec(peer.EmbeddingConfig(10, 4, "t", init_fn=init.zeros_))
    assert zeros.init_rule() == ("constant", 0.0, 0.0)
    assert from_torchrec(zeros) is zeros


def test_from_torchrec_refuses_what_the_config_refuses() -> None:
    with pytest.raises(ConfigError, match="tables that are trained have"):
        from_torchrec(peer.EmbeddingConfig(10, 4, "t", data_type=peer.DataType.INT8))
    with pytest.raises(ConfigError, match="cannot be honoured"):
        from_torchrec(peer.EmbeddingConfig(10, 4, "t", init_fn=init.xavier_normal_))
    with pytest.raises(ConfigError, match="got dict, which has no num_embeddings"):
        from_torchrec({"name": "t"})


def test_sizes_may_be_numpys() -> None:
    config = EmbeddingBagConfig(np.int64(9), np.int32(4), "t")
    assert (type(config.num_embeddings), type(config.embedding_dim)) == (int, int)
    with TieredEmbedding(np.int64(9), np.int32(4)) as module:
        assert module.rows([8]).shape == (1, 4)
