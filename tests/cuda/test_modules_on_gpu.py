"""Modules whose ``hbm`` is on a fake GPU: tensors are where they must be, with the bits of the host."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_torch import GpuTensor, copies_by_another_thread, fake_torch, finish
from tests.cuda.test_training_on_fake_gpu import counters
from tierstore import ConfigError, InputError, TierConfig, optim
from tierstore.modules import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
    TieredEmbedding,
    TieredEmbeddingBag,
    offload,
)
from tierstore.modules.inputs import warn_of_copied_ids
from tierstore.sparse import KeyedJaggedTensor

ROWS, DIM = 200, 8
CONFIG = TierConfig(hbm="10KiB", uvm="6KiB", ssd="1GiB", engine="memory")
ADAM = optim.Adam(lr=0.05)


@pytest.fixture(autouse=True)
def said_once() -> None:
    warn_of_copied_ids.cache_clear()


def ints(*shape: int, seed: int = 0, below: int = ROWS) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def keyed(seed: int, weighted: bool = False, shared: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids of keys a and b, four examples; ``shared``: examples share bags."""
    random = torch.Generator().manual_seed(seed)
    more: dict[str, Any] = {}
    bags = 8
    if shared:
        more = {
            "stride_per_key_per_rank": [[3], [2]],
            "inverse_indices": (["a", "b"], torch.tensor([[0, 1, 2, 1], [1, 1, 0, 0]])),
        }
        bags = 5
    lengths = torch.randint(0, 5, (bags,), generator=random)
    n = int(lengths.sum())
    values = torch.randint(0, ROWS, (n,), generator=random)
    weights = torch.rand(n, generator=random) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths=lengths, weights=weights, **more)


def dense(found: Any) -> Tensor:
    """The tensors of an output, side by side."""
    if isinstance(found, Tensor):
        return found.reshape(-1)
    if isinstance(found, dict):
        return torch.cat([part.values().reshape(-1) for part in found.values()])
    return found.values().reshape(-1)


KINDS = (DataType.BF16, DataType.FP16, DataType.FP32)


def collection(
    weighted: bool = False, device: str | None = None, kinds: Sequence[DataType] = (DataType.FP32,) * 3
) -> EmbeddingBagCollection:
    """Two row layouts or more, all poolings."""
    poolings = (PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM if weighted else PoolingType.MAX)
    tables = [
        EmbeddingBagConfig(ROWS, dim, f"t{i}", kind, feature_names=names, pooling=pooling)
        for i, (dim, names, pooling, kind) in enumerate(
            zip((8, 3, 8), (["a"], ["b"], ["a", "b"]), poolings, kinds, strict=True)
        )
    ]
    config = replace(CONFIG, uvm="10KiB") if len({*kinds}) > 1 else CONFIG  # more row layouts
    return EmbeddingBagCollection(tables, weighted, device, config=config, optimizer=ADAM)


def half(
    make: Callable[..., Any], dtype: torch.dtype, rounds: bool, **more: Any
) -> Callable[[str | None], Any]:
    """A module with one table of 16 bits."""
    config = replace(CONFIG, stochastic_rounding=rounds)
    more |= {"dtype": dtype, "config": config, "optimizer": ADAM}
    return lambda device: make(ROWS, DIM, device=device, **more)


MODULES: dict[str, tuple[Callable[[str | None], Any], Callable[[int], tuple[Any, ...]]]] = {
    "rows": (
        lambda device: TieredEmbedding(ROWS, DIM, device=device, config=CONFIG, optimizer=ADAM),
        lambda step: (ints(4, 5, seed=step),),
    ),
    "rows with padding": (
        lambda device: TieredEmbedding(
            ROWS, DIM, 3, device=device, config=CONFIG, optimizer=ADAM, _weight=torch.rand(ROWS, DIM)
        ),
        lambda step: (ints(4, 5, seed=step, below=9),),
    ),
    "max": (
        lambda device: TieredEmbeddingBag(
            ROWS, DIM, mode="max", device=device, config=CONFIG, optimizer=ADAM
        ),
        lambda step: (ints(20, seed=step).int(), torch.tensor([0, 5, 5, 11])),
    ),
    "collection": (lambda device: collection(device=device), lambda step: (keyed(step),)),
    "weighted": (lambda device: collection(True, device), lambda step: (keyed(step, weighted=True),)),
    "shared bags": (lambda device: collection(device=device), lambda step: (keyed(step, shared=True),)),
    "sequences": (
        lambda device: EmbeddingCollection(
            [EmbeddingConfig(ROWS, dim, f"t{dim}", feature_names=["a", "b"]) for dim in (8, 3)], device,
            need_indices=True, config=CONFIG, optimizer=ADAM,
        ),
        lambda step: (keyed(step),),
    ),
    "rows of bf16": (half(TieredEmbedding, torch.bfloat16, True), lambda step: (ints(4, 5, seed=step),)),
    "bags of fp16": (
        half(TieredEmbeddingBag, torch.float16, False, mode="mean"), lambda step: (ints(4, 5, seed=step),)
    ),
    "max of bf16": (
        half(TieredEmbeddingBag, torch.bfloat16, False, mode="max"),
        lambda step: (ints(20, seed=step).int(), torch.tensor([0, 5, 5, 11])),
    ),
    "collection of dtypes": (lambda device: collection(False, device, KINDS), lambda step: (keyed(step),)),
    "weighted of dtypes": (
        lambda device: collection(True, device, KINDS), lambda step: (keyed(step, weighted=True),)
    ),
    "sequences of fp16": (
        lambda device: EmbeddingCollection(
            [
                EmbeddingConfig(ROWS, dim, f"t{dim}", DataType.FP16, feature_names=["a", "b"])
                for dim in (8, 3)
            ],
            device, need_indices=True, config=CONFIG, optimizer=ADAM,
        ),
        lambda step: (keyed(step),),
    ),
}  # fmt: skip


def trained(name: str, device: str | None, ids_on: str | None = None, prefetch: bool = False) -> list[Any]:
    """Outputs, rows and counters of a training that uses everything a module has."""
    make, inputs = MODULES[name]
    torch.manual_seed(7)
    module = make(device)
    found: list[Any] = []
    with module:
        batches = [inputs(step) for step in range(10)]
        if ids_on is not None:
            batches = [tuple(part.to(ids_on) for part in batch) for batch in batches]
        for batch in tierstore.prefetch(batches, module, depth=2, window=3) if prefetch else batches:
            out = dense(module(*batch)).float()
            assert out.device == torch.device(device or "cpu")
            ((out - 0.3) ** 2).sum().backward()
            found.append(out.detach().cpu())
        with tierstore.accumulate(module) as rows:
            for batch in batches[:3]:
                dense(module(*batch)).square().sum().backward()
            found.append(nn.utils.clip_grad_norm_(rows.parameters(), 1.0).cpu())
        found.append(counters(module.stats()))
        module.eval()
        found.append(dense(module(*batches[1])).cpu())
        with torch.no_grad():
            found.append(dense(module.train()(*batches[2])).cpu())
        state = module.state_dict()
        found += [value for key, value in sorted(state.items())]
        table = None if len(module.table_names()) == 1 else module.table_names()[0]
        found.append(module.optimizer_rows(torch.arange(ROWS), table)["exp_avg_sq"])
        module.load_state_dict(state)
        found.append(module.rows(torch.arange(ROWS), table))
    return found


@functools.cache
def on_host(name: str, prefetch: bool = False) -> list[Any]:
    """What all runs of a module on a GPU must give."""
    return trained(name, None, prefetch=prefetch)


def same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, Tensor):
            assert not isinstance(mine, GpuTensor)
            assert torch.equal(mine, other)
        else:
            assert mine == other


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_the_bits_of_the_host(name: str, order: str) -> None:
    expected = on_host(name)
    with fake_torch(order, seed=5):
        found = trained(name, "cuda:0")
        assert fake_gpu().counts["launches"] > 50
    same(found, expected)


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("name", MODULES)
def test_another_thread_may_copy_before_a_kernel_is_launched(name: str, order: str) -> None:
    """Kernels use no memory that was freed before they were launched, which torch may give to others."""
    expected = on_host(name)
    with fake_torch(order, seed=5), copies_by_another_thread():
        found = trained(name, "cuda:0")
    same(found, expected)


def test_memory_is_freed_when_the_kernels_launched_before_are_done() -> None:
    freed: list[str] = []
    with fake_torch("lazy"):
        tensor = torch.ones(8, device="cuda")
        weakref.finalize(tensor.inner.untyped_storage(), freed.append, "tensor")
        tensor.data_ptr()
        worker = threading.Thread(target=finish)
        worker.start()
        worker.join()  # before a kernel is launched with the address
        del tensor
        assert freed == []  # the kernel may not have run
        finish()
        assert freed == ["tensor"]


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["rows with padding", "max", "collection", "sequences"])
def test_ids_may_be_on_the_gpu(
    name: str, prefetch: bool, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = on_host(name, prefetch)
    with fake_torch(order, seed=5), caplog.at_level(logging.WARNING, "tierstore"):
        found = trained(name, "cuda:0", ids_on="cuda:0", prefetch=prefetch)
    same(found, expected)
    said = [record.message for record in caplog.records if "are on a GPU" in record.message]
    assert 1 <= len(said) <= 2  # of ids, and of offsets
    assert "Leave ids on the CPU" in said[0]


@pytest.mark.parametrize("ids_on", ["cpu", "cuda:0"])
def test_wrong_ids_are_named_before_anything_changes(ids_on: str) -> None:
    with fake_torch(), collection(device="cuda") as module:
        module(keyed(1)).values().sum().backward()
        before = module.state_dict()
        wrong = keyed(2)
        wrong.values()[4] = ROWS
        with pytest.raises(InputError, match=rf"feature '[ab]': id {ROWS} at position \d+ is out of range"):
            module(wrong.to(ids_on))
        same(list(module.state_dict().values()), list(before.values()))
    message = "ids are on cuda:0, but the tables on the CPU; move them with"
    with (
        fake_torch(),
        TieredEmbeddingBag(9, 8, optimizer=ADAM) as bag,
        pytest.raises(InputError, match=message),
    ):
        bag(torch.tensor([[1]]).to("cuda"))


@pytest.mark.parametrize("ids_on", ["cpu", "cuda:0"])
def test_a_prefetch_names_wrong_ids_where_they_are_used(ids_on: str) -> None:
    batches = [ints(4, 5, seed=step) for step in range(6)]
    batches[3][2, 1] = -1
    with (
        fake_torch("random", seed=2),
        TieredEmbeddingBag(ROWS, DIM, mode="sum", device="cuda", config=CONFIG, optimizer=ADAM) as bag,
    ):
        given = [batch.to(ids_on) for batch in batches]
        for step, ids in enumerate(tierstore.prefetch(given, bag, depth=2, window=3)):
            if step == 3:
                before = bag.rows(torch.arange(ROWS))
                with pytest.raises(InputError, match="id -1 at position 11 is out of range"):
                    bag(ids)
                assert torch.equal(bag.rows(torch.arange(ROWS)), before)
            else:
                bag(ids).sum().backward()


# -- models ------------------------------------------------------------------------------------


class Model(nn.Module):
    """Plain layers of torch, to be offloaded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([self.items(ids).sum(1), self.bags(ids)], 1)).sum()


def model_trained(device: str | None) -> list[Any]:
    model = Model().to(device or "cpu")
    offloaded = offload(model, CONFIG, ADAM)
    assert offloaded.engine.device.name == (device or "cpu")
    assert {str(parameter.device) for parameter in model.parameters()} == {device or "cpu"}
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with offloaded:
        for step in range(8):
            dense_optimizer.zero_grad()
            loss = model(ints(6, 4, seed=step))
            loss.backward()
            dense_optimizer.step()
            losses.append(loss.detach().cpu())
        return [*losses, *(value.detach().cpu() for _, value in sorted(model.state_dict().items()))]


def test_a_model_is_offloaded_where_it_is() -> None:
    expected = model_trained(None)
    with fake_torch("random", seed=1):
        same(model_trained("cuda:0"), expected)


def test_a_model_on_several_devices_is_refused() -> None:
    with fake_torch(devices=2):
        model = Model()
        model.items.to("cuda:1")
        with pytest.raises(
            ConfigError, match="the embeddings are on cpu, cuda:1; move the model to one device"
        ):
            offload(model, CONFIG, ADAM)
        with offload(Model(), TierConfig(hbm="all", device="cuda:1"), ADAM) as offloaded:
            assert offloaded.engine.device.name == "cuda:1"


@pytest.mark.parametrize(
    ("opened", "moved"), [("cuda:0", "cpu"), ("cuda:0", "cuda:1"), (None, "cuda:0"), ("cuda:1", "cuda")]
)
def test_a_model_that_is_moved_is_refused(opened: str | None, moved: str) -> None:
    with fake_torch(devices=2):
        model = nn.Sequential(TieredEmbedding(ROWS, DIM, device=opened, config=CONFIG, optimizer=ADAM))
        message = rf"the rows of tables embedding are on {opened or 'cpu'}, .* cannot be moved to {moved}"
        with pytest.raises(ConfigError, match=message):
            model.cpu() if moved == "cpu" else model.to(moved)
        model.to(opened or "cpu").double().float()
        model(torch.tensor([3])).sum().backward()
        model[0].close()


def test_two_modules_train_on_two_gpus() -> None:
    expected = [on_host("max"), on_host("collection")]
    with fake_torch("random", devices=2) as opened:
        found = [trained("max", "cuda:0"), trained("collection", "cuda:1")]
        assert [device.name for device in opened] == ["cuda:0", "cuda:1"]
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)
    with fake_torch("random", devices=2):
        modules = [
            TieredEmbeddingBag(ROWS, DIM, mode="sum", device=f"cuda:{i}", config=CONFIG, optimizer=ADAM)
            for i in range(2)
        ]
        for step in range(5):
            outs = [module(ints(4, 5, seed=step)) for module in modules]
            sum(out.cpu().square().sum() for out in outs).backward()
        rows = [module.rows(torch.arange(ROWS)) for module in modules]
        assert torch.equal(*rows)
        for module in modules:
            module.close()


# -- around a training ---------------------------------------------------------------------------


def test_a_graph_that_is_dropped_gives_its_rows_back() -> None:
    with (
        fake_torch("lazy"),
        TieredEmbeddingBag(ROWS, DIM, device="cuda", config=CONFIG, optimizer=ADAM) as bag,
    ):
        for step in range(30):
            bag(ints(8, 5, seed=step))
        before = bag.rows(torch.arange(ROWS))
        bag(ints(8, 5)).sum().backward()
        assert not torch.equal(bag.rows(torch.arange(ROWS)), before)
