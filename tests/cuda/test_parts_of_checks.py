"""The parts of the kernels that ``make gpu-pack`` compiles are those that the checks on a GPU load."""

from __future__ import annotations

import pytest

from tests.cuda import parts_of_checks, test_on_gpu, test_training_on_gpu, test_uvm_on_gpu
from tests.cuda.fake_device import fake_device
from tests.cuda.loaded_parts import loaded_parts
from tests.cuda.parts_of_checks import GPU_ALONE, OF_ROWS, checks_of, parts_of_trainings
from tests.cuda.random_work import RandomWork
from tierstore.cuda.compute import parts_of
from tierstore.cuda.rows import ANY_LAYOUT


def test_every_check_of_rows_says_which() -> None:
    assert OF_ROWS.keys() == checks_of(test_on_gpu).keys()


@pytest.mark.parametrize("layout", [(20, "fp32", 1), (3, "bf16", 9)], ids=str)
def test_random_work_loads_the_parts_of_its_rows(layout: tuple[int, str, int]) -> None:
    dim, weights, kind = layout
    with loaded_parts() as loaded, fake_device("random", seed=3) as device:
        work = RandomWork(device, dim, kind, 3, weights)
        work.do(60)
        del work
    assert loaded == {ANY_LAYOUT, *parts_of([layout])}


def test_rows_of_uvm_load_the_parts_of_theirs() -> None:
    with loaded_parts() as loaded, fake_device("random", seed=3) as device:
        work = test_uvm_on_gpu.Hierarchy(device, "pinned", 3)
        work.do(60)
        del work
    assert len(loaded) > 1
    assert loaded <= {ANY_LAYOUT, *parts_of([test_uvm_on_gpu.COMPUTED])}


def test_parts_of_trainings_are_found_by_training() -> None:
    """Every check of a training runs here on the CPU, but those that want something of a GPU."""
    found = parts_of_trainings()
    layouts = [(3, "fp32"), (64, "fp32"), (64, "bf16"), (64, "fp16")]
    rows = [(dim, weights, kind) for dim, weights in layouts for kind in range(10)]
    assert {ANY_LAYOUT, *parts_of(rows)} <= found
    names = {name.partition("[")[0] for name in GPU_ALONE}
    assert names <= checks_of(test_training_on_gpu).keys()


def test_a_check_that_fails_unexpectedly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def test_new() -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(parts_of_checks, "checks_of", lambda module: {"test_new": test_new})
    with pytest.raises(AssertionError, match=r"name them in GPU_ALONE.*test_new"):
        parts_of_trainings()
