"""The parts of the kernels that the checks on a GPU and ``tierstore bench gpu`` load.

Nobody keeps a list of them. The checks of whole trainings run here on the CPU, whose tables, gradient hooks
and norms say which rows they compute on as those of a GPU do; tests/cuda/fake_torch.py checks that trainings
on a GPU load no other parts. The checks of rows alone, which only a GPU can run, have parameters that say it.

``python -m tests.cuda.parts_of_checks`` prints the parts as JSON.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from bench._gpu_rows import OPTIMIZER
from bench._gpu_sizes import Sizes
from tests.cuda import test_on_gpu, test_training_on_gpu, test_uvm_on_gpu
from tierstore.cache.device import ComputedRows, HostDevice
from tierstore.cuda.compute import parts_of
from tierstore.cuda.cubins import Part
from tierstore.cuda.rows import ANY_LAYOUT

OF_ROWS: dict[str, list[ComputedRows]] = {
    "test_kernels_have_the_bits_of_the_host": [
        (dim, weights, kind) for dim, kind, weights in test_on_gpu.LAYOUTS
    ],
    "test_streams_wait_for_one_another_whatever_is_late": [test_on_gpu.LATE],
    "test_lookups_that_it_makes_are_those_of_the_host": [],
    "test_rows_move_between_hbm_and_uvm": [test_uvm_on_gpu.COMPUTED],
    "test_rows_move_between_hbm_and_uvm_whatever_is_late": [test_uvm_on_gpu.COMPUTED],
    "test_kernels_are_compiled_once_and_kept": [],  # it compiles, and keeps that in a folder of its own
    "test_the_driver_has_every_call": [],
}
"""The rows that each check of test_on_gpu.py computes on."""
GPU_ALONE = {
    "test_a_lookup_in_a_captured_graph_is_refused": "CUDA graphs",
    "test_a_run[what does not fit is refused]": "the name and the memory of a GPU",
    "test_a_side_stream_may_be_current": "CUDA streams",
    "test_growth_beyond_the_gpu_is_named_and_keeps_the_rows": "the memory of a GPU",
    "test_memory_comes_back_when_tables_are_closed": "the memory of a GPU",
    "test_nccl_moves_vectors": "NCCL, and no table",
    "test_tiers_have_the_bits_and_hits_of_the_host[managed uvm]": "managed memory",
    "test_tiers_have_the_bits_and_hits_of_the_host[uvm, managed]": "managed memory",
}
"""Checks of test_training_on_gpu.py that end early on a CPU, and what they want. Their tables are those of
other checks."""


def checks_of(module: ModuleType) -> dict[str, Callable[..., None]]:
    """Return the test functions of a module."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: function for name, function in found if name.startswith("test_")}


def _cases(function: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each of a function's tests."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        yield dict(zip((mark.args[0] for mark in marks), values, strict=True))


@contextmanager
def _prepared() -> Iterator[set[Part]]:
    """Yield a set that gets the parts that a GPU would have ready where the CPU is."""
    found: set[Part] = set()

    def prepare(
        _: HostDevice, rows: Collection[ComputedRows] = (), updated: Collection[ComputedRows] = ()
    ) -> None:
        found.update([ANY_LAYOUT, *parts_of(rows, updated)])

    with mock.patch.object(HostDevice, "prepare", prepare):
        yield found


def parts_of_trainings() -> set[Part]:
    """Run the checks of test_training_on_gpu.py on the CPU; return the parts that they load on a GPU.

    Raises AssertionError for a check that fails though it is none of ``GPU_ALONE``: what comes after the
    failure is unknown.
    """
    failed: dict[str, BaseException] = {}
    with _prepared() as found, mock.patch.object(test_training_on_gpu, "GPU", "cpu"):
        for name, function in checks_of(test_training_on_gpu).items():
            for case in _cases(function):
                on_cpu = {key: "cpu" if value == "cuda:0" else value for key, value in case.items()}
                with tempfile.TemporaryDirectory() as folder:
                    if "tmp_path" in inspect.signature(function).parameters:
                        on_cpu["tmp_path"] = Path(folder)
                    try:
                        function(**on_cpu)
                    except (Exception, pytest.fail.Exception) as error:
                        named = [f"{name}[{value}]" for value in case.values()]
                        if not GPU_ALONE.keys() & {name, *named}:
                            failed[f"{name}{case}"] = error
    assert not failed, f"these checks fail on the CPU; name them in GPU_ALONE: {failed}"
    return found


def parts_of_bench(sizes: Sizes) -> list[Part]:
    """Return the parts that ``tierstore bench gpu`` loads, in all of its parts together."""
    return [ANY_LAYOUT, *parts_of([(sizes.dim, "fp32", OPTIMIZER.step_args().kind)])]


def parts_of_checks() -> list[Part]:
    """Return all parts that are loaded, each once. It takes some ten seconds."""
    of_rows = parts_of([*itertools.chain(*OF_ROWS.values())])
    of_trainings = sorted(parts_of_trainings(), key=str)
    return list(dict.fromkeys([*parts_of_bench(Sizes()), *of_rows, *of_trainings]))


if __name__ == "__main__":
    json.dump([asdict(part) for part in parts_of_checks()], sys.stdout)
