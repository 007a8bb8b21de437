"""What modules do on a GPU beside plain training: run on the fake GPU by the suite, and on silicon."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tests.cuda.test_modules_on_gpu import ADAM, CONFIG, DIM, ROWS, collection, ints, keyed, same
from tierstore import ConfigError, GpuError, InputError, TierConfig, TierFullError, checkpoint, optim
from tierstore.modules import TieredEmbeddingBag
from tierstore.sharding import DistributedModelParallel

ALL = torch.arange(ROWS)
IDS_OF_FAKE_GPU = 1 << 12
"""Of a lookup that is large: the emulator takes a minute for as many as a GPU gets."""
OPTIMIZERS: dict[str, optim.OptimizerSpec] = {
    "sgd": optim.SGD(lr=0.1, weight_decay=0.01),
    "momentum": optim.SGD(
        lr=0.1, momentum=0.9, dampening=0.1, weight_decay_mode="decoupled", weight_decay=0.01
    ),
    "nesterov": optim.SGD(lr=0.1, momentum=0.9, nesterov=True, clip_grad_value=0.5),
    "decay of all rows": optim.SGD(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled_global"),
    "row-wise adagrad": optim.RowWiseAdagrad(lr=0.1, clip_grad_norm=1.0),
    "adagrad": optim.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    "adam": optim.Adam(lr=0.1, weight_decay=0.01),
    "adamw": optim.AdamW(lr=0.1, clip_grad_norm=0.5),
    "partial adam": optim.PartialRowWiseAdam(lr=0.1, weight_decay=0.01),
    "lars": optim.LarsSGD(lr=0.1, weight_decay=0.01),
    "lamb": optim.LAMB(lr=0.1, weight_decay=0.01),
    "partial lamb": optim.PartialRowWiseLAMB(lr=0.1),
}


def bag(device: str | None, config: TierConfig = CONFIG, rows: int = ROWS, **more: Any) -> TieredEmbeddingBag:
    more = {"optimizer": ADAM, **more}
    return TieredEmbeddingBag(rows, more.pop("dim", DIM), mode="sum", device=device, config=config, **more)


def step(module: TieredEmbeddingBag, number: int) -> Tensor:
    out = module(ints(4, 5, seed=number))
    out.float().square().sum().backward()
    return out.detach().cpu()


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def optimizer_run(
    name: str, dim: int, device: str | None, dtype: str | None = None, random: bool = False
) -> list[Any]:
    """Outputs, rows and their state; one row is used often enough to be added in pieces.

    ``dtype``: of a table of 16 bits; ``random``: rounding of its updates.
    """
    hot = torch.cat([torch.zeros(1300, dtype=torch.int64), ints(501), torch.full((257,), 9)]).view(-1, 3)
    more: dict[str, Any] = {} if dtype is None else {"dtype": DTYPES[dtype]}
    size = -(-dim // DIM)  # longer rows, with budgets for as many
    config = replace(
        CONFIG, hbm=f"{10 * size}KiB", uvm=f"{6 * size}KiB", stochastic_rounding=random and dtype is not None
    )
    with bag(device, config, optimizer=OPTIMIZERS[name], dim=dim, **more) as module:
        found = [step(module, number) for number in range(6)]
        module(hot).sum().backward()
        found.append(module.rows(ALL))
        return [*found, *(value for _, value in sorted(module.optimizer_rows(ALL).items()))]


def a_checkpoint_is_restored(folder: Path, device: str) -> None:
    """On the GPU, and from its store and its state on the CPU."""

    def made(name: str, where: str | None) -> TieredEmbeddingBag:
        return bag(where, TierConfig(hbm="10KiB", uvm="6KiB", path=folder / name))

    with made("a", device) as module:
        for number in range(6):
            step(module, number)
            if number == 3:
                checkpoint.save(folder / "saved", module, step=3)
        expected = module.rows(ALL)
        checkpoint.restore(folder / "saved", module)
        for number in range(4, 6):
            step(module, number)
        assert torch.equal(module.rows(ALL), expected)
        saved = io.BytesIO()
        torch.save(module.state_dict(), saved)
        module.close(commit=False)
    with made("a", None) as module:
        for number in range(4, 6):
            step(module, number)
        assert torch.equal(module.rows(ALL), expected)
        module.commit()
    with made("a", device) as module:
        assert torch.equal(module.rows(ALL), expected)
    saved.seek(0)
    with bag(None, TierConfig()) as other:
        other.load_state_dict(torch.load(saved))
        assert torch.equal(other.rows(ALL), expected)


def a_forked_child_leaves_the_tables_alone(_: Path, device: str) -> None:
    """As a DataLoader's worker does, which is made after the tables were opened."""
    with bag(device) as module:
        step(module, 0)
        expected = module.rows(ALL)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                module.rows(torch.arange(3))
            except tierstore.ClosedError:
                module.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(module.rows(ALL), expected)
        loader = torch.utils.data.DataLoader(list(ints(12, 5)), batch_size=4, num_workers=1)
        for ids in loader:
            module(ids).sum().backward()


def two_modules_take_turns(_: Path, device: str) -> None:
    """They are on one GPU, or the second on another if there is one; ``device`` is the first's."""
    second = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.device_count() else device
    results = []
    for where in ((None, None), (device, second)):
        first, other = bag(where[0]), bag(where[1], optimizer=optim.RowWiseAdagrad(lr=0.1))
        found = []
        for number in range(8):
            outs = [module(ints(4, 5, seed=number)) for module in (first, other)]
            sum(out.cpu().square().sum() for out in outs).backward()
            found += [out.detach().cpu() for out in outs]
        results.append([*found, first.rows(ALL), other.rows(ALL)])
        first.close()
        other.close()
    same(*results)


def wrong_ids_are_named_before_anything_changes(_: Path, device: str) -> None:
    for ids_on in ("cpu", device):
        with collection(device=device) as module:
            module(keyed(1)).values().sum().backward()
            before = module.state_dict()
            wrong = keyed(2)
            wrong.values()[4] = ROWS
            with pytest.raises(
                InputError, match=rf"feature '[ab]': id {ROWS} at position \d+ is out of range"
            ):
                module(wrong.to(ids_on))
            same(list(module.state_dict().values()), list(before.values()))


def what_does_not_fit_is_refused(folder: Path, device: str) -> None:
    """``hbm`` beyond what the GPU has free, with both numbers, before anything is opened."""
    with bag(device) as module:
        free = module.engine.device.memory()[0]
    config = TierConfig(hbm=4 * free, path=folder / "rows")
    with pytest.raises(ConfigError, match=r"hbm is .*, and its rows take .* of cuda:0, of which .* are free"):
        bag(device, config, rows=1 << 40)
    assert not (folder / "rows").exists()
    with bag(device) as module:
        step(module, 0)


def memory_comes_back(device: str) -> None:
    """What tables took of the GPU is free after ``close()``. No other process may use the GPU meanwhile."""
    ids = 1 << 17 if torch.cuda.device_count() else IDS_OF_FAKE_GPU
    with bag(device) as module:
        device_of_rows = module.engine.device
        step(module, 0)
        free = device_of_rows.memory()[0]
        for _ in range(4):
            with bag(device, TierConfig(hbm=384 * ids, uvm=256 * ids), rows=8 * ids) as other:
                other(torch.arange(ids).view(8, -1)).sum().backward()
                assert device_of_rows.memory()[0] < free
        assert free - device_of_rows.memory()[0] < 192 * ids  # half of what the rows of all rounds took


def a_sharded_model_of_one_rank_trains(folder: Path, device: str) -> None:
    """As a job of one GPU does, whose dense gradients would go by NCCL."""
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() else "gloo"
    dist.init_process_group(backends, init_method=f"file://{folder / 'ranks'}", rank=0, world_size=1)
    try:
        results = []
        for where in (None, device):
            sparse = nn.Sequential(collection(device="meta"))
            with DistributedModelParallel(sparse, device=where or "cpu", config=CONFIG) as model:
                found = []
                for number in range(6):
                    out = model(keyed(number)).values()
                    out.square().sum().backward()
                    found.append(out.detach().cpu())
                assert out.device == torch.device(where or "cpu")
                results.append([*found, *(value.cpu() for value in model.state_dict().values())])
        same(*results)
    finally:
        dist.destroy_process_group()


RUNS: dict[str, Callable[[Path, str], None]] = {
    run.__name__.replace("_", " "): run
    for run in (
        a_checkpoint_is_restored, a_forked_child_leaves_the_tables_alone, two_modules_take_turns,
        wrong_ids_are_named_before_anything_changes, what_does_not_fit_is_refused,
        a_sharded_model_of_one_rank_trains,
    )
}  # fmt: skip


def growth_beyond_the_gpu_keeps_the_rows(device: str, fill: Callable[[Any], object]) -> None:
    """``fill`` leaves less than a lookup needs of the memory of a device for rows."""
    count = 1 << 20 if torch.cuda.device_count() == 0 else 1 << 22
    with bag(device, TierConfig(hbm="all"), rows=count) as table:
        table(torch.arange(64).view(8, 8)).sum().backward()
        before = table.rows(torch.arange(64))
        kept = fill(table.engine.device)
        with pytest.raises(TierFullError, match=r"hbm: .* of GPU memory are needed, and .* of .* are free"):
            table(torch.arange(count).view(8, -1))
        assert torch.equal(table.rows(torch.arange(64)), before)
        del kept
        table(torch.arange(64).view(8, 8)).sum().backward()


def a_captured_graph_is_refused(device: str, capturing: Callable[[], AbstractContextManager]) -> None:
    """Nothing changes, and training goes on afterwards."""
    results = []
    for where in (None, device):
        with bag(where) as module:
            found = [step(module, 0)]
            if where:
                with capturing(), pytest.raises(GpuError, match=r"CUDA graph is being captured"):
                    module(ints(4, 5, seed=0))
            found += [step(module, number) for number in range(1, 5)]
            results.append([*found, module.rows(ALL)])
    same(*results)


def pipeline_losses(device: str | None) -> list[Tensor]:
    """Losses of a model whose dense leaves the pipeline moves to the GPU, and whose ids it leaves."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.bags = collection(device=device)
            self.top = nn.Linear(3, 1).to(device or "cpu")

        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            features, numbers = batch
            assert numbers.device == torch.device(device or "cpu")
            assert features.values().is_cpu
            out = self.top(numbers).sum() + self.bags(features).values().square().sum()
            return out, out

    model = Both()
    batches = iter([(keyed(number), torch.full((4, 3), float(number))) for number in range(8)])
    pipeline = tierstore.PrefetchPipeline(
        model, torch.optim.SGD(model.top.parameters(), 1e-3), device or "cpu", depth=2, window=3
    )
    found = []
    with suppress(StopIteration):
        while True:
            found.append(pipeline.progress(batches).detach().cpu())
    assert len(found) == 8
    assert model.bags.stats()["stall_seconds"] >= 0
    model.bags.close()
    return found
