"""NVRTC that is gone or fails: one named error, before anything changes. Nothing that lookups and updates
need is compiled after the tables were opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tierstore
from tests.cuda.fake import fake_gpu
from tests.cuda.fake_device import FakeDevice
from tests.cuda.fake_torch import fake_torch
from tests.cuda.module_runs import OPTIMIZERS, optimizer_run
from tests.cuda.test_modules_on_gpu import ADAM, CONFIG, DIM, ROWS, ints, on_host, same, trained
from tests.cuda.test_nvrtc import BROKEN
from tierstore import GpuError, TierConfig, TieredEmbeddingBag
from tierstore.cuda.cubins import CubinCache
from tierstore.cuda.nvrtc import open_nvrtc

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

    def prepare(device: FakeDevice, rows: Any = ()) -> None:
        fails = all_kernels or len(rows) > 0
        with compiling_fails(device, fault, tmp_path / "kernels") if fails else nullcontext():
            plain(device, rows)

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
def gone_after_opening(folder: Path, norms: bool = False) -> Iterator[None]:
    """``norms``: what norms of gradients take is compiled, too."""
    plain = FakeDevice.prepare

    def prepare(device: FakeDevice, rows: Any = ()) -> None:
        plain(device, [*rows, *((dim, weights, 0) for dim, weights, _ in rows if norms)])
        if rows:
            device.parts.kernels._cubins._nvrtc = FAULTS["no library"][0]["_nvrtc"]
            device.parts.kernels._cubins._cache = CubinCache(folder)

    with mock.patch.object(FakeDevice, "prepare", prepare):
        yield


@pytest.mark.parametrize("name", ["rows", "max", "weighted", "sequences", "collection of dtypes"])
def test_nobody_compiles_after_tables_were_opened(name: str, tmp_path: Path) -> None:
    with fake_torch("random", seed=5), gone_after_opening(tmp_path, norms=True):
        found = trained(name, "cuda:0")
    same(found, on_host(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nobody_compiles_for_an_optimizer_later(name: str, tmp_path: Path) -> None:
    with fake_torch("random", seed=5), gone_after_opening(tmp_path):
        found = optimizer_run(name, DIM, "cuda:0")
    same(found, optimizer_run(name, DIM, None))


def state(module: Any) -> list[Any]:
    return [module.rows(ALL), *module.optimizer_rows(ALL).values(), module.fused_optimizer.num_updates]


def update(module: TieredEmbeddingBag, way: str, number: int) -> None:
    """Make an update that needs more than the kernels of the table's optimizer."""
    if way == "hooks":
        module(ints(4, 5, seed=number)).square().sum().backward()
        return
    with tierstore.accumulate(module) as rows:
        module(ints(4, 5, seed=number)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(rows.parameters(), 0.5)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", ["hooks", "norms"])
def test_an_update_that_needs_more_is_refused_before_anything_changes(
    way: str, fault: str, tmp_path: Path
) -> None:
    results = []
    for device in (None, "cuda:0"):
        with fake_torch("random", seed=5) if device else nullcontext(), bag(device) as module:
            if way == "hooks":
                module.register_gradient_hook(lambda ids, gradients: gradients * 0.5)
            if device:
                before = state(module)
                for _ in range(2):
                    with (
                        compiling_fails(module.engine.device, fault, tmp_path) as message,
                        pytest.raises(GpuError, match=message),
                    ):
                        update(module, way, 0)
                    same(state(module), before)
            for number in range(4):
                update(module, way, number)
            results.append(state(module))
    same(*results)
