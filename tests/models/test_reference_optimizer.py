from __future__ import annotations

import numpy as np
import pytest
import torch

from tierstore.models.reference import RowWiseAdagrad


@pytest.mark.parametrize("sparse", [False, True])
def test_row_wise_adagrad_follows_its_formula(sparse):
    table = torch.nn.EmbeddingBag(12, 5, mode="sum", sparse=sparse)
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.1, eps=1e-3)
    weight, total = table.weight.detach().double().numpy().copy(), np.zeros(12)
    rng = np.random.default_rng(0)
    for _ in range(5):
        ids, offsets = torch.from_numpy(rng.integers(0, 12, 20)), torch.arange(0, 20, 4)
        upstream = torch.from_numpy(rng.normal(size=(5, 5))).float()
        optimizer.zero_grad()
        table(ids, offsets).backward(upstream)
        optimizer.step()
        gradient = np.zeros((12, 5))
        np.add.at(gradient, ids.numpy(), upstream.double().numpy().repeat(4, axis=0))
        total += (gradient**2).mean(axis=1)
        weight -= 0.1 * gradient / (np.sqrt(total) + 1e-3)[:, None]
    np.testing.assert_allclose(table.weight.detach().numpy(), weight, rtol=1e-4, atol=1e-6)


def test_closures_are_refused():
    with pytest.raises(ValueError, match="no closure"):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(2, 2))]).step(lambda: 0)
