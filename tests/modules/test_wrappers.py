"""What users put around models with tables, in one process: the bits of the plain model, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import tierstore
from tests.modules.module_oracles import small_tiers
from tierstore import optim
from tierstore.modules import TieredEmbedding, TieredEmbeddingBag

ROWS, STEPS = 40, 4
SPEC = optim.Adagrad(lr=0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"config": small_tiers([4], SPEC, 20), "optimizer": SPEC}
        self.bag = TieredEmbeddingBag(ROWS, 4, mode="sum", name="bag", **options)
        self.row = TieredEmbedding(ROWS, 4, padding_idx=3, name="row", **options)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top((self.bag(ids) * self.row(ids).sum(1)).tanh()).square().mean()


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, ROWS, (5, 3), generator=random) for _ in range(STEPS)]


Step = Callable[[nn.Module, Tensor], None]


def plain(model: nn.Module, ids: Tensor) -> None:
    model(ids).backward()


def train(wrap: Callable[[nn.Module], nn.Module], step: Step) -> list[Tensor]:
    model = Model()
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for ids in batches():
        optimizer.zero_grad()
        step(wrapped, ids)
        optimizer.step()
    found = [parameter.detach() for parameter in model.top.parameters()]
    for table in (model.bag, model.row):
        found += [table.rows(torch.arange(ROWS)), *table.optimizer_rows(torch.arange(ROWS)).values()]
        table.close()
    return found


def frozen_in_between(model: nn.Module, ids: Tensor) -> None:
    model.requires_grad_(False)
    model(ids)
    model.requires_grad_(True)
    model(ids).backward()


def validated_in_between(model: nn.Module, ids: Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        model(ids)
    model.train()
    with torch.no_grad():
        model(ids)
    model(ids).backward()


def recomputed(reentrant: bool) -> Step:
    def step(model: nn.Module, ids: Tensor) -> None:
        anchor = torch.zeros((), requires_grad=True)
        checkpoint(lambda ids, anchor: model(ids) + anchor, ids, anchor, use_reentrant=reentrant).backward()

    return step


def with_scaler_off(model: nn.Module, ids: Tensor) -> None:
    torch.amp.GradScaler("cpu", enabled=False).scale(model(ids)).backward()


def with_scaler(model: nn.Module, ids: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    dense = [parameter for parameter in model.parameters() if parameter.numel()]
    with tierstore.accumulate(model) as rows:
        scaler.scale(model(ids)).backward()
        scaler.step(rows)
    for parameter in dense:
        assert parameter.grad is not None
        parameter.grad /= 2.0**10


def accumulated(model: nn.Module, ids: Tensor) -> None:
    with tierstore.accumulate(model):
        model(ids).backward()


def detecting_anomalies(model: nn.Module, ids: Tensor) -> None:
    with torch.autograd.set_detect_anomaly(True):
        model(ids).backward()


def of_all_parameters(model: nn.Module, ids: Tensor) -> None:
    model(ids).backward(inputs=list(model.parameters()))


def derived_before(model: nn.Module, ids: Tensor) -> None:
    """torch.autograd.grad changes no parameter, and no row."""
    parameters = list(model.parameters())
    loss = model(ids)
    for asked in (parameters, [one for one in parameters if one.numel()]):
        torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
    loss.backward()


def functional(model: nn.Module, ids: Tensor) -> None:
    torch.func.functional_call(model, dict(model.named_parameters()), (ids,)).backward()


def clipped(model: nn.Module, ids: Tensor) -> None:
    model(ids).backward()
    for norm in (2.0, float("inf")):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e9)


def moved(model: nn.Module) -> nn.Module:
    return model.to("cpu").share_memory().float().requires_grad_(True)


def with_its_own_state(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


WORKS: dict[str, tuple[Callable[[nn.Module], nn.Module], Step]] = {
    "sequential": (nn.Sequential, plain),
    "data parallel": (nn.DataParallel, plain),
    "compiled": (lambda model: torch.compile(model, backend="aot_eager"), plain),
    "moved": (moved, plain),
    "its own state": (with_its_own_state, plain),
    "frozen in between": (nn.Sequential, frozen_in_between),
    "validated in between": (nn.Sequential, validated_in_between),
    "recomputed": (nn.Sequential, recomputed(False)),
    "recomputed, reentrant": (nn.Sequential, recomputed(True)),
    "scaler, off": (nn.Sequential, with_scaler_off),
    "scaler": (nn.Sequential, with_scaler),
    "accumulated": (nn.Sequential, accumulated),
    "anomalies": (nn.Sequential, detecting_anomalies),
    "of all parameters": (nn.Sequential, of_all_parameters),
    "derived before": (nn.Sequential, derived_before),
    "functional call": (nn.Sequential, functional),
    "clipped": (nn.Sequential, clipped),
}


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_training_has_the_bits_of_the_plain_model(name: str) -> None:
    for mine, other in zip(train(*WORKS[name]), train(nn.Sequential, plain), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("wrap", [copy.deepcopy, AveragedModel])
def test_copies_are_refused(wrap: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        wrap(Model())


TRANSFORMED: dict[str, Callable[[Model, Tensor], object]] = {
    "grad": lambda model, ids: torch.func.grad(lambda factor: model(ids) * factor)(torch.ones(())),
    "vjp": lambda model, ids: torch.func.vjp(lambda factor: model(ids) * factor, torch.ones(())),
    "jvp": lambda model, ids: torch.func.jvp(
        lambda factor: model(ids) * factor, (torch.ones(()),), (torch.ones(()),)
    ),
    "vmap": lambda model, ids: torch.func.vmap(model.row)(ids),
    "vmap, reading": lambda model, ids: torch.func.vmap(model.eval().bag)(ids.view(-1, 1, 3)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_lookups_inside_of_transforms_of_functions_are_refused(name: str) -> None:
    model, (ids, *_) = Model(), batches()
    before = model.bag.rows(range(ROWS))
    with pytest.raises(tierstore.ConfigError, match=r"inside of a transform of torch\.func"):
        TRANSFORMED[name](model, ids)
    assert torch.equal(model.bag.rows(range(ROWS)), before)


def test_outputs_of_lookups_may_be_transformed() -> None:
    model, (ids, *_) = Model(), batches()
    pooled, weight = model.bag(ids), model.top.weight.detach()
    own = torch.func.vmap(torch.func.grad(lambda w, row: (w @ row).square().sum()), (None, 0))(weight, pooled)
    torch.testing.assert_close(own, 2 * (pooled @ weight.T).unsqueeze(1) * pooled.unsqueeze(1))
    own.sum().backward()
    assert model.bag.fused_optimizer.num_updates == 1
