"""Checks marked ``cuda`` run where a GPU is; elsewhere they are counted, in several processes, too.

Files that take longest are begun first, so that no process is alone with one at the end.
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long examples take to make says more of a busy machine than of a test.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Here and in the programs of tests. Else a process that compiles a graph starts one per core, each of which
# imports torch first: that takes longer than to compile the few graphs of a test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The processor says which vector instructions it has. Else each process that compiles a graph first compiles
# and loads a library for each of them, the latter in an interpreter that imports torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

LONGEST_FIRST = [
    "tests/cache_policies/test_policy_conformance.py",
    "tests/docs/test_blocks.py",
    "tests/attack/test_attack.py",
    "tests/store/native/test_nearly_full.py",
    "tests/cuda/test_sharded_on_gpu.py",
    "tests/pipeline/test_interrupts.py",
    "tests/test_memory_budget.py",
    "tests/cuda/test_compiled_kernels.py",
    "tests/sharding/test_stopped_ranks.py",
    "tests/store/native/test_large_stores.py",
    "tests/store/native/test_native_faults.py",
    "tests/examples/test_examples.py",
    "tests/cuda/test_modules_on_gpu.py",
    "tests/cache_policies/test_live_equals_simulated.py",
    "tests/modules/test_lookup_ops.py",
    "tests/mirror/test_scripts.py",
    "tests/pipeline/test_ends_of_processes.py",
    "tests/test_host_process.py",
    "tests/bench/test_bench_hit_rate.py",
    "tests/cache_policies/test_libcachesim.py",
    "tests/checkpoint/test_killed.py",
    "tests/cli/test_cli_ranks.py",
    "tests/store/native/test_native_interrupts.py",
    "tests/cuda/test_emulated_kernels.py",
    "tests/cuda/test_module_runs.py",
    "tests/bench/test_hit_rate_tiers.py",
    "tests/sharding/test_accumulation.py",
]

_wanted = pytest.StashKey[tuple[int, str]]()


def _missing() -> str:
    """Why no GPU can be used here; empty where one can."""
    from tierstore.cuda.driver import Driver
    from tierstore.errors import GpuError

    try:
        Driver().open_device(0)
    except GpuError as error:
        return str(error)
    return ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m cuda`` import no file without such checks: other files need packages that a machine which is
    lent for its GPU may lack."""
    if config.option.markexpr != "cuda" or not collection_path.match("test_*.py"):
        return None
    marked = re.search(r"^pytestmark = .*pytest\.mark\.cuda", collection_path.read_text(), re.MULTILINE)
    return None if marked else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    want = [item for item in items if item.get_closest_marker("cuda")]
    missing = _missing() if want else ""
    if missing:
        config.hook.pytest_deselected(items=want)
        items[:] = [item for item in items if item not in want]
        config.stash[_wanted] = len(want), missing
        getattr(config, "workeroutput", {})["wanted"] = len(want), missing


def pytest_collection_finish() -> None:
    """Keep the garbage collector from searching all modules and all tests: they stay until the process ends,
    and tests and the modules under test search for objects of their own again and again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process has collected all checks."""
    if "wanted" in getattr(node, "workeroutput", {}):
        node.config.stash[_wanted] = node.workeroutput["wanted"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count, missing = config.stash.get(_wanted, (0, ""))
    if count:
        terminalreporter.write_line(f"{count} checks want a GPU and did not run: {missing}")
