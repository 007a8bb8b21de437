"""``device="cuda"``: what is chosen, and what can be wrong with it, is said before anything is allocated."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_torch import fake_torch
from tierstore import (
    ConfigError,
    GpuError,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    optim,
)
from tierstore.cache import machine
from tierstore.cuda.driver import Driver

SGD = optim.SGD(lr=0.5)


def bag(rows: int = 400, **more: Any) -> TieredEmbeddingBag:
    config = more.pop("config", None) or TierConfig(hbm="64KiB", ssd=0, device="cuda")
    return TieredEmbeddingBag(rows, 8, mode="sum", config=config, optimizer=SGD, **more)


def test_a_device_has_a_name() -> None:
    names = {None: None, "cpu": "cpu", "cuda": "cuda", "cuda:3": "cuda:3", torch.device("cuda", 1): "cuda:1"}
    for given, name in names.items():
        config = TierConfig(device=given)
        assert config.device == name
        assert config.on_gpu == (name not in (None, "cpu"))
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", 0, "mps"):
        with pytest.raises(ConfigError, match=r'device is .*; it must be "cpu", "cuda" or a GPU'):
            TierConfig(device=wrong)
    with pytest.raises(ConfigError, match="uvm_kind is 'paged'; it must be one of 'pinned', 'managed'"):
        TierConfig(uvm_kind="paged")
    with pytest.raises(ConfigError, match="uvm_kind is 'managed', but the tables are on the CPU"):
        bag(config=TierConfig(hbm="64KiB", uvm="64KiB", uvm_kind="managed"))


def test_without_a_driver_the_error_says_so() -> None:
    """This is what users of a machine without a GPU see."""
    try:
        Driver()
    except GpuError:
        for device in ("cuda", "cuda:7"):
            with pytest.raises(GpuError, match=r"no NVIDIA driver is here.*Install"):
                bag(config=TierConfig(device=device))
            with pytest.raises(GpuError, match=r"no NVIDIA driver is here.*Install"):
                TieredEmbedding(10, 8, device=device, optimizer=SGD)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (lambda gpu: gpu.set_driver(version=11080), r"is for CUDA 11\.8.*newer driver"),
        (lambda gpu: gpu.set_driver(devices=0), "no GPU can be used"),
        (lambda gpu: gpu.set_driver(architecture=52), r"does not compile for this GPU \(sm_52\)"),
        (lambda gpu: gpu.fail("cuModuleLoadData", 2), "cuModuleLoadData failed"),
        (lambda gpu: gpu.fail("cuStreamCreateWithPriority", 2), "cuStreamCreateWithPriority failed"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said_when_tables_are_opened(
    setup: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    with fake_torch():
        setup(fake_gpu())
        with pytest.raises(GpuError, match=message):
            bag(config=TierConfig(hbm="64KiB", path=tmp_path / "rows", device="cuda"))
        fake_gpu().begin()
    assert not (tmp_path / "rows").exists()


def test_a_missing_compiler_is_said_when_tables_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_torch():

        def none(*_: object) -> Any:
            raise GpuError("no NVRTC is here")

        monkeypatch.setattr("tierstore.cuda.cubins.CubinCache.get", lambda self, key: None)
        monkeypatch.setattr("tierstore.cuda.device.open_nvrtc", none)
        with pytest.raises(GpuError, match="no NVRTC is here"):
            bag()


def test_a_torch_without_gpus_is_named() -> None:
    with (
        fake_torch(),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(GpuError, match=r"there is a GPU, but this torch .* cannot use it"),
    ):
        bag()


def test_a_gpu_that_is_not_there_is_named() -> None:
    with fake_torch(), pytest.raises(GpuError, match="there is no GPU number 1: the driver shows 1"):
        bag(config=TierConfig(device="cuda:1"))


def test_a_budget_beyond_the_gpu_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with fake_torch():
        fake_gpu().set_memory(1 << 19)
        config = TierConfig(hbm="3MiB", path=tmp_path / "rows", device="cuda")
        message = r"hbm is 3 MiB, and its rows take .* KiB of cuda:0, of which 512 KiB of 512 KiB are free"
        with pytest.raises(ConfigError, match=message):
            bag(1 << 20, config=config)
        assert fake_gpu().alive[0] == 0
        assert not (tmp_path / "rows").exists()
        # The driver has the last word.
        with pytest.raises(ConfigError, match=r"hbm: no room for .* of GPU memory are needed, and 512 KiB"):
            bag(1 << 20, config=TierConfig(hbm="3MiB", ssd=0, overcommit=True, device="cuda"))


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_a_budget_beyond_the_hosts_memory_is_refused_with_both_numbers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = namedtuple("found", ["available", "total"])
    config = TierConfig(hbm="64KiB", uvm="3MiB", device="cuda", uvm_kind=kind)
    with fake_torch():
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: found(1 << 19, 1 << 34))
        message = r"uvm is 3 MiB, and its rows take .* KiB of memory that is locked .* 512 KiB of"
        with pytest.raises(ConfigError, match=message):
            bag(1 << 20, config=config)
        call = "cuMemHostRegister" if kind == "pinned" else "cuMemAllocManaged"
        monkeypatch.undo()
        fake_gpu().fail(call, 2)
        with pytest.raises(ConfigError, match=r"uvm: no room for .* (cannot be locked|refuses)"):
            bag(1 << 20, config=config)
        assert fake_gpu().alive == (0, 0)


def test_managed_memory_beyond_the_gpu_is_refused_with_both_numbers() -> None:
    """Pinned memory may be more, and so may managed memory if the user says so."""
    with fake_torch():
        fake_gpu().set_memory(1 << 20)
        given = {"hbm": "64KiB", "uvm": "4MiB", "device": "cuda"}
        message = r"uvm is 4 MiB, and its rows take 1\.\d* MiB of managed .* cuda:0 .* 1 MiB of 1 MiB now"
        with pytest.raises(ConfigError, match=message):
            bag(1 << 20, config=TierConfig(**given, uvm_kind="managed"))
        assert fake_gpu().alive == (0, 0)
        for more in ({"uvm_kind": "managed", "overcommit": True}, {}):
            with bag(1 << 20, config=TierConfig(**given, **more)) as table:
                table(torch.arange(24).view(8, 3)).sum().backward()


def test_hbm_on_a_gpu_takes_none_of_the_hosts_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 1 << 30)
    machine.check_machine(TierConfig(hbm="64GiB", uvm="1GiB", device="cuda"))
    with pytest.raises(
        ConfigError, match="uvm is 2 GiB, and this process can have 1 GiB of memory; lower it"
    ):
        machine.check_machine(TierConfig(hbm="64GiB", uvm="2GiB", device="cuda"))
    with pytest.raises(ConfigError, match=r"uvm and read_ahead are 1\.5 GiB, and .* lower them"):
        machine.check_machine(TierConfig(hbm="64GiB", uvm="1GiB", read_ahead="512MiB", device="cuda"))


def test_a_kernel_that_fails_is_named_and_committed_rows_are_kept(tmp_path: Path) -> None:
    config = TierConfig(hbm="8KiB", path=tmp_path / "rows")
    ids = torch.arange(24).view(8, 3)
    with fake_torch("lazy"):
        table = bag(device="cuda", config=config)
        table(ids).sum().backward()
        table.commit()
        expected = table.rows(torch.arange(400))
        table(ids).sum().backward()
        fake_gpu().fail_kernel("update_singles")

        def step() -> None:  # what the kernel was asked for is known later
            table(ids).sum().backward()
            table.rows(ids.view(-1))

        with pytest.raises(GpuError, match=r"a kernel has failed .*update_singles.* last commit are safe"):
            step()
        with pytest.raises(GpuError, match="update_singles"):
            table(ids)
        with pytest.raises(GpuError, match="update_singles"):
            table.close()
    with bag(config=config) as again:  # on the CPU
        assert torch.equal(again.rows(torch.arange(400)), expected)


def test_a_store_is_opened_on_either_device(tmp_path: Path) -> None:
    config = TierConfig(hbm="8KiB", uvm="4KiB", path=tmp_path / "rows")
    ids = torch.randint(400, (20, 8, 3), generator=torch.Generator().manual_seed(1))
    for step, batch in enumerate(ids):
        device = "cuda" if step % 2 else "cpu"
        with fake_torch("random", seed=step), bag(device=device, config=config) as table:
            table(batch).square().sum().backward()
    with bag(config=TierConfig(hbm="64KiB", ssd=0)) as plain:
        for batch in ids:
            plain(batch).square().sum().backward()
        expected = plain.rows(torch.arange(400))
    with bag(config=config) as table:
        assert torch.equal(table.rows(torch.arange(400)), expected)


def test_a_modules_device_and_its_configurations_must_agree() -> None:
    with fake_torch(devices=2):
        for device, config, expected in (
            ("cuda", TierConfig(), "cuda:0"),
            ("cuda:1", TierConfig(), "cuda:1"),
            (None, TierConfig(device="cuda:1"), "cuda:1"),
            ("cuda", TierConfig(device="cuda:1"), "cuda:1"),
            ("cpu", TierConfig(), "cpu"),
            (torch.device("cuda", 1), None, "cuda:1"),
        ):
            with TieredEmbedding(10, 8, device=device, config=config, optimizer=SGD) as table:
                assert table.engine.device.name == expected
                assert str(table(torch.tensor([1])).device) == expected
        for device, config in (("cpu", "cuda"), ("cuda:0", "cuda:1"), ("cuda", "cpu")):
            with pytest.raises(ConfigError, match=r"device is .*, but the configuration has device="):
                TieredEmbedding(10, 8, device=device, config=TierConfig(device=config), optimizer=SGD)
        with pytest.raises(ConfigError, match="device is meta; tiers are on the CPU or a GPU"):
            TieredEmbedding(10, 8, device="meta", optimizer=SGD)


def test_an_engine_that_cannot_open_gives_the_device_back(tmp_path: Path) -> None:
    with fake_torch() as opened:
        with pytest.raises(ConfigError, match="the hbm budget of 100 bytes"):
            bag(config=TierConfig(hbm=100, device="cuda"))
        assert not opened[-1].streams.is_usable
        (tmp_path / "file").touch()
        with pytest.raises(Exception, match="file"):
            bag(config=TierConfig(path=tmp_path / "file", device="cuda"))
        assert not opened[-1].streams.is_usable
