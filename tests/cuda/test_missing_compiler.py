"""NVRTC that is gone or fails: one named error, before anything changes. Nothing that lookups and updates
need is compiled after the tables were opened, and a hook or norms were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

import tierstore
from tests.cuda.fake import fake_gpu
from tests.cuda.fake_device import FakeDevice
from tests.cuda.fake_torch import fake_torch
from tests.cuda.module_runs import OPTIMIZERS, optimizer_run
from tests.cuda.test_modules_on_gpu import (
    ADAM,
    CONFIG,
    DIM,
    MODULES,
    ROWS,
    dense,
    ints,
    on_host,
    same,
    trained,
)
from tests.cuda.test_nvrtc import BROKEN
from tierstore import GpuError, TierConfig, TieredEmbeddingBag
from tierstore.cuda.cubins import CubinCache
from tierstore.cuda.nvrtc import open_nvrtc
from tierstore.modules.accumulation import Accumulation

ALL = torch.arange(ROWS)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no library": (
        {"_nvrtc": lambda: open_nvrtc(13, ["/nowhere/libnvrtc.so.13"])},
        r"no NVRTC is here, .*pip install nvidia-cuda-nvrtc",
    ),
    "no compilation": (
        {"_source": BROKEN},
        r"did not compile the GPU kernels .*try another release.*no kernels here",
    ),
    "no such architecture": (
        {"architecture": 35},
        r"does not compile for this GPU \(sm_35\), only for .*install a newer torch",
    ),
}


@contextmanager
def compiling_fails(device: FakeDevice, fault: str, folder: Path) -> Iterator[str]:
    """Let a device compile nothing, and find nothing that was kept; yield the error's message."""
    changes, message = FAULTS[fault]
    with mock.patch.multiple(device.parts.kernels._cubins, _cache=CubinCache(folder), **changes):
        yield f"(?s){message}"


def bag(device: str | None, config: TierConfig = CONFIG) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(ROWS, DIM, mode="sum", device=device, config=config, optimizer=ADAM)


@pytest.mark.parametrize("all_kernels", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_named_when_tables_are_opened(fault: str, all_kernels: bool, tmp_path: Path) -> None:
    """Before there is a store; also if the kernels of any row were compiled before."""
    plain = FakeDevice.prepare

    def prepare(device: FakeDevice, rows: Any = (), updated: Any = ()) -> None:
        fails = all_kernels or len(rows) > 0
        with compiling_fails(device, fault, tmp_path / "kernels") if fails else nullcontext():
            plain(device, rows, updated)

    config = TierConfig(hbm="10KiB", path=tmp_path / "rows")
    with fake_torch() as opened:
        with (
            mock.patch.object(FakeDevice, "prepare", prepare),
            pytest.raises(GpuError, match=f"(?s){FAULTS[fault][1]}"),
        ):
            bag("cuda:0", config)
        assert not (tmp_path / "rows").exists()
        assert not any(device.streams.is_usable for device in opened)
        assert fake_gpu().alive == (0, 0)
        with bag("cuda:0", config) as table:
            table(ints(4, 5)).sum().backward()


@contextmanager
def compiled_to_prepare_alone(folder: Path) -> Iterator[None]:
    """Let a device find a compiler, and kernels that were kept, only while it gets ready for rows."""
    plain = FakeDevice.prepare
    known: dict[FakeDevice, dict[str, Any]] = {}

    def prepare(device: FakeDevice, rows: Any = (), updated: Any = ()) -> None:
        cubins = device.parts.kernels._cubins
        vars(cubins).update(known.get(device, {}))
        known[device] = dict(vars(cubins))
        plain(device, rows, updated)
        vars(cubins).update(FAULTS["no library"][0], _cache=CubinCache(folder))

    with mock.patch.object(FakeDevice, "prepare", prepare):
        yield


@pytest.mark.parametrize("name", ["rows", "max", "weighted", "sequences", "collection of dtypes"])
def test_nobody_compiles_in_a_training(name: str, tmp_path: Path) -> None:
    with fake_torch("random", seed=5), compiled_to_prepare_alone(tmp_path):
        found = trained(name, "cuda:0")
    same(found, on_host(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nobody_compiles_for_an_optimizer_later(name: str, tmp_path: Path) -> None:
    with fake_torch("random", seed=5), compiled_to_prepare_alone(tmp_path):
        found = optimizer_run(name, DIM, "cuda:0")
    same(found, optimizer_run(name, DIM, None))


def halve(ids: Tensor, gradients: Tensor) -> Tensor:
    return gradients * 0.5


def test_hooks_on_meta_are_ready_when_the_tables_are_opened(tmp_path: Path) -> None:
    make, inputs = MODULES["collection"]
    with fake_torch("random", seed=5) as opened, compiled_to_prepare_alone(tmp_path), make("meta") as module:
        module.register_gradient_hook(halve, module.table_names()[0])
        assert not opened
        module.to_empty(device="cuda:0")
        for step in range(2):
            dense(module(*inputs(step))).sum().backward()


def state(module: Any) -> list[Any]:
    return [module.rows(ALL), *module.optimizer_rows(ALL).values(), module.fused_optimizer.num_updates]


def train(module: TieredEmbeddingBag, rows: Accumulation | None, number: int) -> None:
    module(ints(4, 5, seed=number)).square().sum().backward()
    if rows is not None:
        torch.nn.utils.clip_grad_norm_(rows.parameters(), 0.5)
        rows.step()


@contextmanager
def asked(module: TieredEmbeddingBag, way: str) -> Iterator[Accumulation | None]:
    """Ask for what needs more than the kernels of the table's optimizer."""
    if way == "hooks":
        handle = module.register_gradient_hook(halve)
        yield None
        handle.remove()
        return
    with tierstore.accumulate(module) as rows:
        yield rows


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", ["hooks", "norms"])
def test_hooks_and_norms_are_refused_where_they_are_asked_for(way: str, fault: str, tmp_path: Path) -> None:
    """So that nothing has changed, and nothing is compiled in the middle of a training."""
    results = []
    for device in (None, "cuda:0"):
        with fake_torch("random", seed=5) if device else nullcontext(), bag(device) as module:
            gpu = cast("FakeDevice", module.engine.device)
            fails = partial(compiling_fails, gpu, fault, tmp_path)
            for _ in range(2 if device else 0):
                before, refused = state(module), asked(module, way)
                with fails() as message, pytest.raises(GpuError, match=message):
                    refused.__enter__()
                same(state(module), before)
                assert not module.gradient_hooks()
                assert module.accumulation is None
            for number in range(4):
                with asked(module, way) as rows, fails() if device else nullcontext():
                    train(module, rows, number)
            train(module, None, 4)
            results.append(state(module))
    same(*results)
