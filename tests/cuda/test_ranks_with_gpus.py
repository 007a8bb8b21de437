"""Jobs whose ranks have a GPU each: whole models, waits that are left out, and what is wrong on one rank."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from bench import _exchange
from tests.cuda.fake import fake_gpu
from tests.cuda.fake_nccl import compiled, on_gpus  # noqa: F401  (a fixture that all tests use)
from tests.cuda.fake_torch import GpuTensor, fake_torch
from tests.sharding.ranks import run
from tierstore import (
    ConfigError,
    EmbeddingBagConfig,
    GpuError,
    KeyedJaggedTensor,
    RankError,
    TierConfig,
    TierFullError,
    optim,
)
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingEnv,
    construct_plan,
    planning,
    row_wise,
    shard,
)
from tierstore.sharding.peers import Peers

ROWS, DIM = 400, 8
ROOMY = TierConfig(hbm="64KiB")


def collection(device: str | None = None, rows: int = ROWS) -> tierstore.EmbeddingBagCollection:
    configs = [EmbeddingBagConfig(rows, DIM, "t", feature_names=["f"])]
    return tierstore.EmbeddingBagCollection(
        configs, device=device, config=TierConfig(hbm="all"), optimizer=optim.Adam(lr=0.1), seed=3
    )


def batch(step: int, rank: int, ids: int = 12, rows: int = ROWS) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    values = torch.randint(rows, (ids,), generator=random)
    return KeyedJaggedTensor(["f"], values, lengths=torch.full((4,), ids // 4))


def sharded(config: TierConfig, rows: int = ROWS) -> Any:
    whole = collection(rows=rows)
    return shard(whole, construct_plan(whole, {"t": row_wise()}, 2), config=config)


# -- models --------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, device: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = collection("meta")
        self.over = nn.Linear(DIM, 2)
        if device:
            self.over.to(device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse(features).values())


def model_trained(device: str | None, planned: bool) -> list[Tensor]:
    rank = dist.get_rank()
    model = Model(device and f"{device}:{rank}")
    plan = None if planned else construct_plan(model.sparse, {"t": row_wise()}, 2, name="sparse")
    dmp = DistributedModelParallel(model, device=device, plan=plan, config=TierConfig(hbm="64KiB"))
    assert str(dmp.sharded["sparse"].device) == (f"cuda:{rank}" if device else "cpu")
    assert dmp.plan.device == ("" if plan else device or "cpu")
    dense = torch.optim.SGD(dmp.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(5):
        dense.zero_grad()
        out = dmp(batch(step, rank))
        assert isinstance(out, GpuTensor) == bool(device)
        out.square().sum().backward()
        dense.step()
        found.append(out.detach().cpu())
    found += [value.cpu() for value in dmp.state_dict().values()]
    dmp.close()
    return found


def whole_models(planned: bool) -> None:
    expected = model_trained(None, planned)
    with on_gpus("random") as nccl:
        found = model_trained("cuda", planned)
        assert len(nccl.groups) == 2  # vectors; dense gradients, since the job's own group is gloo's
    assert len(found) == len(expected)
    limit = 1e-5 if planned else 0.0  # the planner may cut tables of GPUs in another way
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("planned", [False, True])
def test_a_whole_model_trains_as_on_cpus(planned: bool) -> None:
    run(2, whole_models, planned)


def planned_for_all_of_a_gpu() -> None:
    with (
        on_gpus(),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 1 << 24)),
        mock.patch.object(planning, "plan_job", wraps=planning.plan_job) as asked,
    ):
        model = Model(f"cuda:{dist.get_rank()}")
        with DistributedModelParallel(model, device="cuda", config=TierConfig(hbm="all")) as dmp:
            assert dmp.plan.device == "cuda"
        job = asked.call_args.args[1]
        assert (job.device, job.hbm_bytes) == ("cuda", 1 << 24)


def test_a_plan_for_whole_gpus_knows_their_memory() -> None:
    run(2, planned_for_all_of_a_gpu)


def commits(path: str) -> None:
    """Trains on GPUs, then goes on from the commit on CPUs, and the other way round."""
    config = TierConfig(hbm="10KiB", uvm="6KiB", ssd="64MiB", path=path)

    def train(first: int, last: int, device: str | None) -> Tensor:
        module = sharded(replace(config, device=device))
        for step in range(first, last):
            module(batch(step, dist.get_rank(), ids=40)).values().square().sum().backward()
        rows = module.rows(torch.arange(ROWS))
        module.close()
        return rows

    for begin in (0, 6):
        with on_gpus("random"):
            on_gpu = train(begin, begin + 3, "cuda")
        assert torch.equal(train(begin + 3, begin + 3, None), on_gpu)
        train(begin + 3, begin + 6, None)
    module = sharded(replace(config, path=None))
    for step in range(12):
        module(batch(step, dist.get_rank(), ids=40)).values().square().sum().backward()
    expected = module.rows(torch.arange(ROWS))
    module.close()
    assert torch.equal(train(12, 12, None), expected)


def test_a_commit_of_gpus_goes_on_on_cpus(tmp_path: Path) -> None:
    run(2, commits, str(tmp_path / "rows"))


# -- who waits -------------------------------------------------------------------------------------


def steps_without_waiting() -> None:
    with on_gpus("lazy"):
        module = sharded(TierConfig(hbm="64KiB", device="cuda"))
        own = [batch(step, dist.get_rank()) for step in range(12)]
        for step, features in enumerate(tierstore.prefetch(own, module, depth=2, window=3)):
            before = fake_gpu().waits
            out = module(features).values()
            out.square().sum().backward()
            assert step < 6 or fake_gpu().waits == before  # at first, memory for index arrays is made
        module.close()


def test_the_training_thread_does_not_wait_for_the_gpu() -> None:
    run(2, steps_without_waiting)


def without_the_wait() -> None:
    with on_gpus(), mock.patch.object(Peers, "follow", return_value=None):
        module = sharded(TierConfig(hbm="64KiB", device="cuda"))
        assert module(batch(0, dist.get_rank())).values().isnan().any()
        module.close()


def test_a_wait_for_vectors_that_is_left_out_is_found() -> None:
    run(2, without_the_wait)


# -- what is wrong on one rank ---------------------------------------------------------------------


def refused(kind: type[Exception], message: str, device: str, hbm: str = "64KiB") -> None:
    with pytest.raises(kind, match=message):
        sharded(TierConfig(hbm=hbm, device=device))


def gpu_is_not_there() -> None:
    with on_gpus(devices=1):
        refused(GpuError, r"^rank 1: there is no GPU number 1: the driver shows 1\.", "cuda")
    with on_gpus():
        sharded(TierConfig(hbm="64KiB", device="cuda")).close()  # nothing is in the way of another attempt


def test_a_rank_without_a_gpu_is_named_on_all_ranks() -> None:
    run(2, gpu_is_not_there)


def no_nccl() -> None:
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank())}), fake_torch(devices=2):
        refused(GpuError, "^this torch .* has no NCCL, by which vectors go from GPU to GPU", "cuda")


def test_missing_nccl_is_named() -> None:
    run(2, no_nccl)


def full_at_creation() -> None:
    with on_gpus():
        if dist.get_rank() == 1:
            fake_gpu().set_memory(4096)
        refused(RankError, r"^rank 1: hbm is 64 KiB, and its rows take .* of cuda:1, of which", "cuda")


def test_a_gpu_without_room_is_named_on_all_ranks() -> None:
    run(2, full_at_creation)


def full_while_it_grows() -> None:
    rank = dist.get_rank()
    with on_gpus() as nccl:
        module = sharded(TierConfig(hbm="all", device="cuda"), rows=1 << 17)

        def train() -> None:
            for step in range(30):
                if rank == 1 and step == 2:
                    fake_gpu().fail("cuMemCreate", 2)
                module(batch(step, rank, ids=800, rows=1 << 17)).values().square().sum().backward()

        with pytest.raises((TierFullError, RankError)) as raised:
            train()
        assert isinstance(raised.value, TierFullError if rank == 1 else RankError)
        if rank == 0:
            assert re.match("rank 1 has stopped after TierFullError: ", str(raised.value))
        assert nccl.aborted >= 1  # nobody waits on the GPU for the rank that has stopped
        module.close(commit=False)


def test_a_gpu_that_is_full_while_rows_come_is_named_on_all_ranks() -> None:
    run(2, full_while_it_grows)


def one_gpu_for_two() -> None:
    for device, number in (("cuda:0", None), ("cuda", 0)):
        with on_gpus(local_rank=number):
            refused(ConfigError, "^ranks 0 and 1 would both use cuda:0 of host .*LOCAL_RANK", device)


def test_ranks_do_not_share_a_gpu() -> None:
    run(2, one_gpu_for_two)


def one_on_a_cpu() -> None:
    with on_gpus():
        device = "cuda" if dist.get_rank() else "cpu"
        refused(ConfigError, r"^rank 1 was given other device \(cpu or cuda\) than rank 0", device)


def test_ranks_are_all_on_gpus_or_none_is() -> None:
    run(2, one_on_a_cpu)


def moved(device: str | None) -> None:
    other = f"cuda:{1 - dist.get_rank()}"
    with on_gpus():
        module = sharded(TierConfig(hbm="64KiB", device=device))
        model = nn.Sequential(module, nn.Linear(DIM, 1))
        for target in ("cpu", other) if device else (other,):
            for one in (module, model):
                message = rf"the rows of tables t are on {module.device}, .* cannot be moved to {target}"
                with pytest.raises(ConfigError, match=message):
                    one.cpu() if target == "cpu" else one.to(target)
        module.to(module.device).double().float()
        module(batch(0, dist.get_rank())).values().sum().backward()
        module.close()


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_sharded_collection_that_is_moved_is_refused(device: str | None) -> None:
    run(2, moved, device)


def fsdp_on_gpus() -> None:
    with on_gpus():
        model = Model(f"cuda:{dist.get_rank()}")
        plan = construct_plan(model.sparse, {"t": row_wise()}, 2, name="sparse")
        with pytest.raises(ConfigError, match='use "ddp" there'):
            DistributedModelParallel(model, plan=plan, device="cuda", dense="fsdp2", config=ROOMY)


def test_fsdp_of_dense_parameters_on_gpus_is_refused() -> None:
    run(2, fsdp_on_gpus)


def leave_out_a_backward_pass() -> None:
    """NCCL's stream waits in place of the host, and takes the next vectors for the gradients."""
    rank, step = dist.get_rank(), -1
    with on_gpus():
        parts = sharded(replace(ROOMY, device="cuda"))
        try:
            for step, of_rank in enumerate(
                tierstore.prefetch([batch(n, rank) for n in range(9)], parts, window=2)
            ):
                loss = parts(of_rank).values().sum()
                if rank == 0 or step != 2:
                    loss.backward()
            found = "nothing"
        except RankError as error:
            found = str(error)
    assert "rank 1 made fewer forward or backward passes" in found
    assert step <= 4


def test_a_rank_that_leaves_out_a_backward_pass_is_named_soon() -> None:
    run(2, leave_out_a_backward_pass)


# -- what exchanges cost -----------------------------------------------------------------------------


def figures() -> None:
    with (
        on_gpus() as nccl,
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(_exchange, "_SIZES", (1 << 12,)),
    ):
        found = _exchange.figures_of_rank(0.05, "cuda")
        assert nccl.exchanges > 20
        assert ShardingEnv.of(None).gpus.of("vectors") in nccl.groups
    assert found["intra_host_bw"] > 0
    assert set(found["exchange_seconds"]) == {"step", "collective", "piece"}


def test_exchanges_between_gpus_are_measured() -> None:
    run(2, figures)
