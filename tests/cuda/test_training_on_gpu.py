"""Whole trainings on a GPU, with the bits, hits and evictions of the CPU. ``pytest -m cuda``.

The same trainings run on the fake driver in the other files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda.module_runs import (
    DTYPES,
    OPTIMIZERS,
    RUNS,
    a_captured_graph_is_refused,
    bag,
    growth_beyond_the_gpu_keeps_the_rows,
    memory_comes_back,
    optimizer_run,
    pipeline_losses,
)
from tests.cuda.test_modules_on_gpu import MODULES, ints, model_trained, same, trained
from tests.cuda.test_training_on_fake_gpu import CONFIGS, dim_of
from tests.cuda.test_training_on_fake_gpu import trained as trained_with
from tierstore.sharding.gpu_groups import GpuGroups

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(90)]
GPU = "cuda:0"
UVM = {f"uvm, {kind}": replace(CONFIGS["uvm and ssd"], uvm_kind=kind) for kind in ("pinned", "managed")}
TIERS = {**CONFIGS, **UVM}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_with_the_bits_of_the_host(name: str) -> None:
    same(trained(name, GPU), trained(name, None))


@pytest.mark.parametrize("dim", [3, 64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_the_host(name: str, dim: int) -> None:
    same(optimizer_run(name, dim, GPU), optimizer_run(name, dim, None))


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_of_16_bits_have_the_bits_of_the_host(name: str, dtype: str, random: bool) -> None:
    same(optimizer_run(name, 64, GPU, dtype, random), optimizer_run(name, 64, None, dtype, random))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", TIERS)
def test_tiers_have_the_bits_and_hits_of_the_host(name: str, prefetch: bool) -> None:
    found, counts = trained_with(prefetch, replace(TIERS[name], device=GPU), dim_of(name))
    on_host = replace(TIERS[name], uvm_kind="pinned")
    expected, expected_counts = trained_with(prefetch, on_host, dim_of(name))
    same(found, expected)
    if not (prefetch and name == "overflow"):  # test_training_on_fake_gpu.py says why
        assert counts == expected_counts


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["rows with padding", "max", "collection", "sequences"])
def test_ids_may_be_on_the_gpu(name: str, prefetch: bool) -> None:
    found = trained(name, GPU, ids_on=GPU, prefetch=prefetch)
    same(found, trained(name, None, prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_side_stream_may_be_current(prefetch: bool) -> None:
    """Forward, backward and updates in a stream that is not the default one."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found = trained("collection", GPU, prefetch=prefetch)
    same(found, trained("collection", None, prefetch=prefetch))


@pytest.mark.parametrize("run", RUNS)
def test_a_run(run: str, tmp_path: Path) -> None:
    RUNS[run](tmp_path, GPU)


def test_memory_comes_back_when_tables_are_closed() -> None:
    memory_comes_back(GPU)


def test_growth_beyond_the_gpu_is_named_and_keeps_the_rows() -> None:
    def fill(device: Any) -> torch.Tensor:
        torch.cuda.empty_cache()
        return torch.empty(device.memory()[0] - (160 << 20), dtype=torch.uint8, device=GPU)

    growth_beyond_the_gpu_keeps_the_rows(GPU, fill)


@contextmanager
def capturing() -> Iterator[None]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")  # what the driver refuses is not the matter here
        try:
            yield
        finally:
            graph.capture_end()
    torch.cuda.synchronize()


def test_a_lookup_in_a_captured_graph_is_refused() -> None:
    a_captured_graph_is_refused(GPU, capturing)


def test_the_pipeline_moves_dense_leaves() -> None:
    """Its side stream copies them; the dense layer is not the host's, bit for bit."""
    for ours, theirs in zip(pipeline_losses(GPU), pipeline_losses(None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_model_trains() -> None:
    """Its dense layers are not the host's, bit for bit."""
    for ours, theirs in zip(model_trained(GPU), model_trained(None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_nccl_moves_vectors(tmp_path: Path) -> None:
    """In a job that has gloo alone, as far as one GPU shows it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        group = GpuGroups(lambda backend: dist.new_group(backend=backend)).of("vectors")
        for n in (0, 1000):
            given, out = torch.rand(n, device=GPU), torch.zeros(n, device=GPU)
            dist.all_to_all_single(out, given, [n], [n], group=group, async_op=True).wait()
            assert torch.equal(out, given)
    finally:
        dist.destroy_process_group()


def compiled_run(compiles: bool) -> list[Any]:
    with bag(GPU) as module:

        def loss_of(ids: torch.Tensor) -> torch.Tensor:
            return module(ids).square().sum()

        loss = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if compiles else loss_of
        for number in range(6):
            loss(ints(4, 5, seed=number)).backward()
        return [
            module.rows(torch.arange(module.num_embeddings)),
            *module.optimizer_rows(torch.arange(9)).values(),
        ]


def test_a_compiled_model_trains_the_same_rows() -> None:
    same(compiled_run(True), compiled_run(False))


@pytest.mark.parametrize("ids_on", ["cpu", GPU])
def test_an_exported_model_has_the_same_outputs(ids_on: str) -> None:
    with bag(GPU) as module:
        model = torch.nn.Sequential(module, torch.nn.Linear(8, 2, device=GPU)).eval()
        ids = ints(4, 5).to(ids_on)
        program = torch.export.export(model, (ids,))
        module.load_rows(torch.arange(9), torch.ones(9, 8))
        assert torch.equal(program.run_decompositions().module()(ids), model(ids))


def test_autocast_leaves_rows_as_they_are() -> None:
    """Vectors are float32 in mixed precision, and gradients of bfloat16 layers reach the rows."""
    with bag(GPU) as module:
        top = torch.nn.Linear(8, 1, device=GPU)
        before = module(ints(4, 5)).detach()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = module(ints(4, 5))
            assert torch.equal(out, before)
            loss = top(out).float().square().sum()
        loss.backward()
        after = module(ints(4, 5)).detach()
        assert after.isfinite().all()
        assert not torch.equal(after, before)


def test_runs_are_the_same_every_time() -> None:
    """No result depends on the order in which threads come."""
    first = optimizer_run("row-wise adagrad", 64, GPU)
    for _ in range(3):
        same(optimizer_run("row-wise adagrad", 64, GPU), first)
