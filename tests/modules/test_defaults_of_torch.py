"""Tables train and are saved alike whatever torch's default dtype and device are.

The meta device stands for the GPU that users make the default: a tensor of ours that is there by mistake has
no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, TierConfig, optim

CONFIGS = {
    "memory": lambda folder: TierConfig(hbm="all"),
    "tiers": lambda folder: TierConfig(hbm="24KiB", uvm="16KiB", ssd="64MiB", path=str(folder)),
    "bf16": lambda folder: TierConfig(hbm="24KiB", ssd="64MiB", ssd_dtype="bf16"),
}
BEGIN, STEPS, ROWS = 3, 5, 100


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def on_cpu(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, device="cpu")


class Bag:
    names = ()

    def made(self, **options: Any) -> Any:
        return tierstore.TieredEmbeddingBag(ROWS, 8, mode="sum", **options)

    def given(self, step: int) -> tuple[Any, ...]:
        return on_cpu([1, 2, step, 4]), on_cpu([0, 2])

    def values(self, out: Any) -> Tensor:
        assert isinstance(out, Tensor)
        return out


class Rows(Bag):
    def made(self, **options: Any) -> Any:
        return tierstore.TieredEmbedding(ROWS, 8, padding_idx=3, **options)

    def given(self, step: int) -> tuple[Any, ...]:
        return (on_cpu([1, 2, step, 3]),)


class PooledCollection(Bag):
    names = ("a",)

    def made(self, **options: Any) -> Any:
        tables = [EmbeddingBagConfig(ROWS, d, n, feature_names=[n]) for d, n in ((8, "a"), (4, "b"))]
        return tierstore.EmbeddingBagCollection(tables, device="cpu", **options)

    def given(self, step: int) -> tuple[Any, ...]:
        ids, lengths = on_cpu([step, 2, 3, step + 4]), on_cpu([1, 1, 1, 1])
        return (KeyedJaggedTensor(["a", "b"], ids, lengths=lengths),)

    def values(self, out: Any) -> Tensor:
        return out.values()


class Collection(PooledCollection):
    def made(self, **options: Any) -> Any:
        tables = [EmbeddingConfig(ROWS, 8, name, feature_names=[name]) for name in ("a", "b")]
        return tierstore.EmbeddingCollection(tables, device="cpu", **options)

    def values(self, out: Any) -> Tensor:
        return torch.cat([part.values() for part in out.values()])


def life(kind: Bag, config: TierConfig) -> list[object]:
    """Train with and without a prefetch, read, write, save and load; return everything that was seen."""
    module, names = kind.made(config=config, optimizer=optim.Adam(lr=0.1)), kind.names
    seen: list[object] = []

    def train(given: tuple[Any, ...]) -> None:
        out = kind.values(module(*given))
        seen.append(out.detach().clone())
        weights = torch.arange(1, out.numel() + 1, device="cpu", dtype=torch.float32)
        (out * weights.view(out.shape)).sum().backward()

    for step in range(BEGIN):
        train(kind.given(step))
    batches = [kind.given(step) for step in range(STEPS)]
    for given in tierstore.prefetch(batches, module, inputs={module: lambda batch: batch}):
        train(given)
    ids = on_cpu([1, 2, 3])
    seen += [module.rows(ids, *names), module.rows([1, 2], *names), module.optimizer_rows(ids, *names)]
    weights, states = dict(module.state_dict()), module.fused_optimizer.state_dict()
    seen += [weights, states]
    module.load_state_dict(weights)
    module.fused_optimizer.load_state_dict(states)
    module.load_rows(ids, module.rows(ids, *names), module.optimizer_rows(ids, *names), *names)
    train(kind.given(2))
    if names:
        weight = getattr(module, module.views_name)["a"].weight
        with torch.no_grad():
            weight[5] = [0.1] * 8  # which bfloat16 rounds
            weight[on_cpu([6])] = on_cpu([[2.0] * 8])
            seen += [weight[5:7], weight[on_cpu([1, 2])], weight.detach()]
            weight.copy_(weight.detach())
    with torch.inference_mode():
        seen.append(kind.values(module.eval()(*kind.given(1))).clone())
    module.close()
    return seen


def assert_same(found: object, wanted: object) -> None:
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor)
        assert (found.dtype, found.device) == (wanted.dtype, wanted.device)
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert found.keys() == wanted.keys()
        assert_same(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, (list, tuple)):
        assert isinstance(found, (list, tuple))
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


DEFAULTS = [(torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "kind", [Bag(), Rows(), PooledCollection(), Collection()], ids=lambda k: type(k).__name__
)
def test_nothing_depends_on_them(kind: Bag, config: Callable[[Path], TierConfig], tmp_path: Path) -> None:
    wanted = life(kind, config(tmp_path / "wanted"))
    for number, (dtype, device) in enumerate(DEFAULTS):
        with defaults(dtype, device):
            found = life(kind, config(tmp_path / str(number)))
        assert_same(found, wanted)
