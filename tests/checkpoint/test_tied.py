"""Dense tensors that share memory: saved once, restored tied; a tie made or broken since is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore
from tierstore import TierConfig, checkpoint, optim
from tierstore.checkpoint.folder import Folder
from tierstore.checkpoint.tree import pack, unpack
from tierstore.errors import StoreMismatchError

DIM = 4


class Model(nn.Module):
    """One tiered table, and dense layers that ``tie`` changes."""

    def __init__(self, folder: Path, tie: Callable[[Model], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = TierConfig(hbm="64KiB", ssd="64MiB", path=folder / "rows")
        self.table = tierstore.TieredEmbeddingBag(50, DIM, config=config, optimizer=optim.SGD(lr=0.1))
        self.one = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.other = nn.ModuleDict({"in": nn.Linear(DIM, DIM), "out": nn.Linear(DIM, DIM)})
        self.register_buffer("mean", torch.zeros(DIM))
        tie(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.other["out"](self.other["in"](self.one(self.table(ids)))).square().mean()


def untied(model: Model) -> None:
    pass


def one_parameter(model: Model) -> None:
    model.other["out"].weight = model.one[0].weight


def one_module(model: Model) -> None:
    model.other["out"] = model.one[0]


def parameter_and_buffer(model: Model) -> None:
    model.mean = model.one[0].bias.detach()


def transposed(model: Model) -> None:
    model.other["out"].weight = nn.Parameter(model.one[0].weight.detach().t())


def parts_of_one_storage(model: Model) -> None:
    flat = torch.randn(3 * DIM * DIM)
    model.one[0].weight = nn.Parameter(flat[: DIM * DIM].view(DIM, DIM))
    model.one[1].weight = nn.Parameter(flat[DIM * DIM : 2 * DIM * DIM].view(DIM, DIM))


def overlapping(model: Model) -> None:
    flat = torch.randn(3 * DIM * DIM)
    model.one[0].weight = nn.Parameter(flat[: DIM * DIM].view(DIM, DIM))
    model.one[1].weight = nn.Parameter(flat[DIM : DIM + DIM * DIM].view(DIM, DIM))


TIES = [one_parameter, one_module, parameter_and_buffer, transposed, parts_of_one_storage, overlapping]


class Training:
    def __init__(self, folder: Path, tie: Callable[[Model], None], shares: bool = False) -> None:
        self.model = Model(folder, tie)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if shares:  # as an optimizer with one counter for all parameters has it
            step = torch.tensor(0.0)
            for parameter in self.model.parameters():
                zeros = torch.zeros_like(parameter)
                self.optimizer.state[parameter] = {
                    "step": step,
                    "exp_avg": zeros,
                    "exp_avg_sq": zeros.clone(),
                }

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.model(torch.randint(0, 50, (8, 3)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def everything(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        return [
            *(value.clone() for value in self.model.state_dict().values()),
            *(value.clone() for part in state.values() for value in part.values()),
        ]


@pytest.mark.parametrize("shares", [False, True], ids=["", "state_shared"])
@pytest.mark.parametrize("tie", [untied, *TIES])
def test_resumed_as_if_never_stopped(tmp_path: Path, tie: Callable[[Model], None], shares: bool) -> None:
    training = Training(tmp_path, tie, shares)
    training.steps(3)
    checkpoint.save(tmp_path / "checkpoints", training.model, training.optimizer, step=3)
    training.steps(3)
    expected = training.everything()
    training.model.table.close(commit=False)
    again = Training(tmp_path, tie)
    checkpoint.restore(tmp_path / "checkpoints", again.model, again.optimizer)
    again.steps(3)
    for value, other in zip(again.everything(), expected, strict=True):
        assert torch.equal(value, other)
    again.model.table.close(commit=False)


def restored(folder: Path, before: Callable[[Model], None], after: Callable[[Model], None]) -> str:
    """How the checkpoint that one model saved is refused for another one, which stays as it was."""
    first = Training(folder, before)
    first.steps(2)
    checkpoint.save(folder / "checkpoints", first.model, step=2)
    first.model.table.close(commit=False)
    second = Training(folder, after)
    state = [value.clone() for value in second.model.state_dict().values()]
    try:
        with pytest.raises(StoreMismatchError) as raised:
            checkpoint.restore(folder / "checkpoints", second.model)
        for value, other in zip(second.model.state_dict().values(), state, strict=True):
            assert torch.equal(value, other)
    finally:
        second.model.table.close(commit=False)
    return str(raised.value)


@pytest.mark.parametrize("tie", [t for t in TIES if t is not parts_of_one_storage])
def test_a_tie_that_was_made_since(tmp_path: Path, tie: Callable[[Model], None]) -> None:
    message = restored(tmp_path, untied, tie)
    assert "share memory in the model, and are different there; build the model that was saved" in message


@pytest.mark.parametrize("tie", [one_parameter, one_module, parameter_and_buffer])
def test_a_tie_that_was_broken_since(tmp_path: Path, tie: Callable[[Model], None]) -> None:
    message = restored(tmp_path, tie, untied)
    assert "one.0." in message
    assert "are one tensor there, and two in the model" in message


def test_parts_of_one_storage_are_no_tie(tmp_path: Path) -> None:
    first = Training(tmp_path, untied)
    checkpoint.save(tmp_path / "checkpoints", first.model, step=0)
    first.model.table.close(commit=False)
    second = Training(tmp_path, parts_of_one_storage)
    assert checkpoint.restore(tmp_path / "checkpoints", second.model) is not None
    assert torch.equal(second.model.one[1].weight, first.model.one[1].weight)
    second.model.table.close(commit=False)


def test_extra_does_not_share_with_what_is_trained(tmp_path: Path) -> None:
    """It may hold tensors of the model and the optimizer, as values that training leaves alone."""
    training = Training(tmp_path, one_parameter)
    training.steps(2)
    best = {"model": dict(training.model.one.state_dict()), "state": dict(training.optimizer.state_dict())}
    extra = {"best": best, "pair": [torch.ones(2)] * 2}
    checkpoint.save(tmp_path / "checkpoints", training.model, training.optimizer, step=2, extra=extra)
    found = checkpoint.restore(tmp_path / "checkpoints", training.model, training.optimizer)
    assert found is not None
    assert found.extra["pair"][0] is found.extra["pair"][1]
    kept = found.extra["best"]
    state = min(kept["state"]["state"].items())[1]
    before = [kept["model"]["0.weight"].clone(), state["exp_avg"].clone()]
    training.steps(2)
    assert not torch.equal(training.model.one[0].weight, before[0])
    assert torch.equal(kept["model"]["0.weight"], before[0])
    assert torch.equal(state["exp_avg"], before[1])
    training.model.table.close(commit=False)


def test_tensors_of_one_memory_are_kept_once(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": weight, "b": weight, "c": weight[:500], "d": weight.view(10, 100), "e": torch.zeros(0)}
    numbers = torch.randn(3, dtype=torch.complex64)
    value |= {"f": numbers, "g": numbers.conj()}
    packed = pack(value, "x", tensors)
    assert set(tensors) == {"x.a", "x.c", "x.d", "x.e", "x.f", "x.g"}
    found = unpack(packed, tensors)
    assert found["a"] is found["b"]
    assert all(torch.equal(found[name], value[name]) for name in value)
    folder = Folder(tmp_path)
    with folder.locked():
        unit = folder.add(0, {"state": packed}, tensors)
    assert set(unit.read_tensors()) == set(tensors)
