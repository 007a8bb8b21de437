"""The runs of module_runs.py on the fake GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_torch import fake_torch
from tests.cuda.module_runs import (
    DTYPES,
    IDS_OF_FAKE_GPU,
    OPTIMIZERS,
    RUNS,
    a_captured_graph_is_refused,
    growth_beyond_the_gpu_keeps_the_rows,
    memory_comes_back,
    optimizer_run,
    pipeline_losses,
)
from tests.cuda.test_modules_on_gpu import same
from tests.density import thinned
from tierstore.cuda import lookups


@pytest.mark.parametrize("dim", [3, 8, 32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_the_host(name: str, dim: int) -> None:
    with fake_torch("random", seed=dim):
        found = optimizer_run(name, dim, "cuda:0")
    same(found, optimizer_run(name, dim, None))


@pytest.mark.parametrize(
    ("name", "dtype", "random"), thinned(itertools.product(OPTIMIZERS, DTYPES, [False, True]), 3)
)
def test_every_optimizer_rounds_as_the_host(name: str, dtype: str, random: bool) -> None:
    for dim in (3, 8, 32):
        with fake_torch("random", seed=dim):
            found = optimizer_run(name, dim, "cuda:0", dtype, random)
        assert found[0].dtype is found[6].dtype is DTYPES[dtype]
        same(found, optimizer_run(name, dim, None, dtype, random))


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("run", RUNS)
def test_a_run(run: str, order: str, tmp_path: Path) -> None:
    devices = 2 if "two" in run else 1  # the end of one device waits for the other's work, too
    with fake_torch(order, seed=4, devices=devices):
        RUNS[run](tmp_path, "cuda:0")


@pytest.mark.parametrize("order", ["lazy", "random"])
def test_memory_comes_back_when_tables_are_closed(order: str) -> None:
    with (
        fake_torch(order, seed=4),
        mock.patch.object(lookups, "MAKES_FROM", IDS_OF_FAKE_GPU // 2),  # the large lookup is the GPU's
    ):
        memory_comes_back("cuda:0")


def test_growth_beyond_the_gpu_is_named_and_keeps_the_rows() -> None:
    def fill(_: Any) -> None:
        fake_gpu().set_memory(fake_gpu().alive[0] + (1 << 20))

    with fake_torch():
        growth_beyond_the_gpu_keeps_the_rows("cuda:0", fill)


@contextmanager
def capturing() -> Iterator[None]:
    fake_gpu().set_capturing(0, True)
    try:
        yield
    finally:
        fake_gpu().set_capturing(0, False)


@pytest.mark.parametrize("order", ORDERS)
def test_a_lookup_in_a_captured_graph_is_refused(order: str) -> None:
    with fake_torch(order, seed=2):
        a_captured_graph_is_refused("cuda:0", capturing)


def test_the_pipeline_moves_dense_leaves_alone() -> None:
    with fake_torch("random", seed=3):
        found = pipeline_losses("cuda:0")
    same(found, pipeline_losses(None))
