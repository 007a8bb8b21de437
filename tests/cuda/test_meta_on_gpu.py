"""Collections that leave the meta device for a fake GPU: there are their rows, with the bits of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cuda.fake import fake_gpu
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_modules_on_gpu import CONFIG, MODULES, ROWS, dense, same
from tierstore import ConfigError
from tierstore.modules.collection import Collection


def trained(module: Collection, name: str) -> list[Any]:
    found: list[Any] = []
    for step in range(6):
        out = dense(module(*MODULES[name][1](step)))
        assert out.device == module.device
        ((out - 0.3) ** 2).sum().backward()
        found.append(out.detach().cpu())
    return found + [module.rows(torch.arange(ROWS), table) for table in module.table_names()]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", ["collection", "sequences"])
def test_leaving_meta_for_a_gpu_opens_the_tables_there(name: str, around: bool) -> None:
    make = MODULES[name][0]
    torch.manual_seed(7)
    with make(None) as plain:
        expected = trained(plain, name)
    with fake_torch("random", seed=2, devices=2) as opened:
        torch.manual_seed(7)
        with make("meta") as module:
            outer: nn.Module = nn.ModuleDict({"tables": module}) if around else module
            assert not opened
            outer.to_empty(device="cuda:1")
            assert module.device == torch.device("cuda:1")
            same(trained(module, name), expected)
            assert [device.name for device in opened] == ["cuda:1"]
        assert fake_gpu().counts["launches"] > 20


def test_tables_that_left_meta_stay_on_their_gpu() -> None:
    with fake_torch(devices=2), MODULES["collection"][0]("meta") as module:
        module.to_empty(device="cuda:0")
        assert isinstance(dense(module(*MODULES["collection"][1](0))), Tensor)
        with pytest.raises(ConfigError, match="the rows of tables t0, t1, t2 are on cuda:0"):
            module.to("cuda:1")


def test_a_configuration_for_a_cpu_is_not_moved_to_a_gpu() -> None:
    with fake_torch():
        module = MODULES["collection"][0]("meta")
        module.engine.config = type(CONFIG)(hbm="10KiB", device="cpu")
        with pytest.raises(ConfigError, match="device is cuda:0, but the configuration has device='cpu'"):
            module.to_empty(device="cuda:0")
        module.close()
