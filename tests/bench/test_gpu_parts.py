"""The parts of ``tierstore bench gpu`` on a fake GPU, which says nothing of speed."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench import _gpu_live, _gpu_lookups, _gpu_parts, _gpu_rows, _gpu_systems, _gpu_training
from bench._gpu_sizes import Figures, Setting, Sizes, cardinalities, fitting
from tests.cuda.fake_torch import fake_torch
from tests.cuda.loaded_parts import loaded_parts
from tests.cuda.parts_of_checks import parts_of_bench
from tierstore.cuda import lookups
from tierstore.data import Batch

SIZES = Sizes(rows=200, dim=8, batch_size=40, max_rows=500, batches=12, width=8)
CEILINGS = {f"{name}_gb_per_s": 1.0 for name in ("copy", "to_gpu", "from_gpu", "both_ways")}


def all_of(figures: Figures) -> dict[str, Any]:
    return {key: value for found in figures for key, value in found.items()}


def wall(call: Callable[[], object], finish: Callable[[], object]) -> float:
    call()
    finish()
    return 1.0


class Ticking:
    """A CUDA event, at a time that passes by one millisecond per event. The host must have waited for events
    whose times it asks for; ``done``: up to which one it has."""

    clock = itertools.count()
    done = -1

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.at = next(self.clock)

    def synchronize(self) -> None:
        Ticking.done = max(self.done, self.at)

    @classmethod
    def synchronize_all(cls) -> None:
        cls.done = next(cls.clock)

    def elapsed_time(self, end: Ticking) -> float:
        assert max(self.at, end.at) <= self.done, "device not ready"
        return float(end.at - self.at)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """What benchmarks use of torch.cuda beside what modules do; no parts of the kernels but those that are
    brought to a GPU."""
    with (
        loaded_parts() as loaded,
        fake_torch("random", seed=2),
        mock.patch.object(torch.cuda, "synchronize", Ticking.synchronize_all),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
        mock.patch.object(torch.cuda, "Event", Ticking),
        mock.patch.object(torch.cuda, "ExternalStream", lambda handle: handle),
        mock.patch.object(torch.cuda, "_sleep", create=True),
        mock.patch.object(Batch, "pin_memory", lambda batch: batch),
        mock.patch.object(_gpu_rows, "copies", return_value=CEILINGS),
        mock.patch.object(_gpu_training, "copies", return_value=CEILINGS),
    ):
        yield
    assert loaded <= set(parts_of_bench(SIZES)), "make gpu-pack does not compile these"


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    made = Setting(SIZES, tmp_path_factory.mktemp("batches"))
    assert all_of(_gpu_training.make_batches(made)) == {"batches": 12}
    return made


def on_cpu(setting: Setting) -> Setting:
    return Setting(setting.sizes, setting.folder, "cpu")


# -- rows ------------------------------------------------------------------------------------------


def test_tables_fit_the_gpu_and_the_host() -> None:
    sizes = Sizes()
    whole = sum(cardinalities(sizes.max_rows))
    found = fitting(sizes, 80 << 30, 120 << 30)
    assert found["table_rows"] == whole  # MLPerf's limit of 40 M rows a table
    for gpu, host in ((8 << 30, 120 << 30), (80 << 30, 8 << 30), (1 << 30, 1 << 30)):
        found = fitting(sizes, gpu, host)
        room = min(0.7 * gpu, 0.5 * host)
        assert 0.9 * room < found["table_bytes"] <= room
        assert found["table_rows"] == sum(cardinalities(found["max_rows"]))
        assert 0 < found["scale"] < 1
        assert found["hbm_budget_bytes"] == found["table_bytes"] // 37


def test_the_gpu_is_opened() -> None:
    with fake_cuda():
        found = all_of(_gpu_rows.opening(SIZES))
    assert found["gpu"] == "a GPU"
    assert found["table_bytes"] <= 0.7 * found["free_bytes"]


def test_the_hosts_memory_may_be_named() -> None:
    with fake_cuda():
        found = all_of(_gpu_rows.opening(replace(SIZES, host_gib=3)))
        assert found["host_free_bytes"] == 3 << 30
    more = Setting(replace(SIZES, host_gib=3), Path())
    with mock.patch.object(_gpu_systems.tierstore, "EmbeddingBagCollection") as made:
        _gpu_systems.SYSTEMS["uvm"](more)
    assert made.call_args.kwargs["config"].overcommit


def test_bits_are_compared() -> None:
    with fake_cuda():
        assert all_of(_gpu_rows.bits(SIZES)) == {"checks": 20, "equal_to_the_cpu": 20}
        assert _gpu_parts.PARTS["bits"].checks == 20


@pytest.mark.parametrize("seconds", [wall, _gpu_rows.kernel_seconds])
def test_kernels_have_figures(seconds: Callable[..., float]) -> None:
    with fake_cuda():
        found = all_of(_gpu_rows.kernels(SIZES, seconds))
    assert all(value > 0 for value in found.values())
    assert {"gather_gb_per_s", "ratio.gather_vs_copy", "ratio.pooled_vs_copy", "ratio.update_vs_copy"} < set(
        found
    )


def test_lookups_of_both_have_figures(setting: Setting) -> None:
    with fake_cuda(), mock.patch.object(lookups, "MAKES_FROM", 1):
        found = all_of(_gpu_lookups.made_lookups(setting))
    assert found["lookups"] == found["equal_to_the_host"] == 8
    assert found["ids"] == 40 * 26
    assert all(found[f"{name}_{figure}"] > 0 for name in ("gpu", "host") for figure in ("ms", "ids_per_s"))


def test_links_have_figures() -> None:
    with fake_cuda():
        found = all_of(_gpu_rows.link(SIZES))
    assert all(value > 0 for value in found.values())
    assert {"pinned.up_gb_per_s", "managed.both_gb_per_s", "ratio.pinned_both_vs_link"} < set(found)


# -- trainings -------------------------------------------------------------------------------------


def trains(found: dict[str, Any]) -> None:
    assert "absent" not in found
    for stage in ("embedding", "dlrm", "dcnv2"):
        assert found[f"{stage}.ms_per_step"] > 0
        assert 1 <= found[f"{stage}.steps"] <= 5  # two, unless the machine is slow
    assert found["batches"] == 12


@pytest.mark.parametrize("name", ["hbm", "uvm", "uvm_ssd"])
def test_tiers_are_trained(name: str, setting: Setting) -> None:
    with fake_cuda():
        found = all_of(_gpu_parts.PARTS[name].run(setting))
    trains(found)
    assert ("bound.ms" in found) == (name == "hbm")


@pytest.mark.parametrize("name", ["embedding_bag", "embedding_bag_host"])
def test_baselines_are_trained(name: str, setting: Setting) -> None:
    trains(all_of(_gpu_training.train(name, on_cpu(setting))))


def test_the_host_baseline_sends_vectors_to_the_gpu(setting: Setting) -> None:
    with fake_cuda():
        trains(all_of(_gpu_training.train("embedding_bag_host", setting)))


def test_all_systems_learn_the_same(setting: Setting) -> None:
    """The vectors after a few steps are nearly equal, whichever way they are made."""
    found = []
    for name in ("hbm", "embedding_bag", "embedding_bag_host"):
        tables = _gpu_systems.SYSTEMS[name](on_cpu(setting))
        batches = _gpu_training.read_batches(on_cpu(setting))
        stage = next(iter(_gpu_training.stages(tables, on_cpu(setting))))
        for batch in batches[:4]:
            stage.step(batch)
        with torch.no_grad():
            found.append(tables.bags(batches[0].sparse).values())
        tables.close()
    assert found[0].std() > 0.001
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_slow_system_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(_gpu_training, "_WARM_SECONDS", 0.15)
    monkeypatch.setattr(_gpu_training, "_SECONDS", 0.2)
    slow = _gpu_training.Stage("slow", lambda batch: time.sleep(0.1))
    found = _gpu_training.timed(slow, range(1000), 100, lambda: None)
    assert 1 <= found["slow.steps"] <= 4
    assert found["slow.ms_per_step"] >= 100
    assert _gpu_training.timed(slow, [1], 1, lambda: None) == {"slow.ms_per_step": None, "slow.steps": 0}


def test_fbgemm_for_cpus_is_absent_on_a_gpu(setting: Setting) -> None:
    pytest.importorskip("fbgemm_gpu")
    for name in ("fbgemm", "fbgemm_uvm"):
        (found,) = _gpu_training.train(name, setting)
        assert "its CUDA build is absent" in found["absent"]
    with mock.patch.dict("sys.modules", {"fbgemm_gpu": None}):
        (found,) = _gpu_training.train("fbgemm", setting)
    assert "fbgemm_gpu is absent" in found["absent"]


@pytest.mark.parametrize(("name", "location"), [("fbgemm", "DEVICE"), ("fbgemm_uvm", "MANAGED_CACHING")])
def test_fbgemm_gets_arguments_that_it_takes(name: str, location: str, setting: Setting) -> None:
    fbgemm_gpu = pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    signature = inspect.signature(training.SplitTableBatchedEmbeddingBagsCodegen.__init__)
    with (
        mock.patch.object(fbgemm_gpu, "__variant__", "cuda"),
        mock.patch.object(training, "SplitTableBatchedEmbeddingBagsCodegen") as made,
    ):
        made.return_value = torch.nn.Identity()
        tables = _gpu_systems.SYSTEMS[name](setting)
    assert tables.ids_on == "cuda"
    given = signature.bind(None, *made.call_args.args, **made.call_args.kwargs).arguments
    assert {(where.name, compute.name) for _, _, where, compute in given["embedding_specs"]} == {
        (location, "CUDA")
    }
    assert ("cache_load_factor" in given) == (name == "fbgemm_uvm")


def test_fbgemm_trains_on_the_cpu(setting: Setting) -> None:
    pytest.importorskip("fbgemm_gpu")
    with mock.patch.dict(_gpu_systems.SYSTEMS, fbgemm=lambda setting: _gpu_systems._fbgemm("HOST", setting)):
        trains(all_of(_gpu_training.train("fbgemm", on_cpu(setting))))


def test_trainings_without_batches_say_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the part 'batches' has failed"):
        list(_gpu_training.train("embedding_bag", Setting(SIZES, tmp_path, "cpu")))


# -- what moves beside what computes, hits, planning -----------------------------------------------


@pytest.mark.parametrize(
    ("some", "other", "expected"),
    [
        ([(0, 2)], [(1, 3)], 1),
        ([(0, 2)], [(2, 3)], 0),
        ([(0, 10)], [(1, 2), (3, 5), (9, 12)], 4),
        ([(0, 4), (2, 6)], [(0, 6), (1, 2)], 6),
        ([], [(0, 1)], 0),
        ([(5, 6), (0, 1)], [(0.5, 5.5)], 1),
    ],
)
def test_shared_time(some: list, other: list, expected: float) -> None:
    assert _gpu_live.shared_time(some, other) == expected
    assert _gpu_live.shared_time(other, some) == expected


def test_overlap_and_hits_of_a_live_run(setting: Setting) -> None:
    with fake_cuda():
        found = all_of(_gpu_live.live(setting))
    assert found["watched_steps"] == 6
    for name in ("up", "down", "index"):
        assert found[f"{name}.busy_ms"] > 0
        assert 0 <= found[f"ratio.{name}_beside_compute"] <= 1
    assert found["hits.equal_to_the_simulator"]
    assert 0 < found["hits.misses"] < found["hits.rows"]


def test_a_difference_to_the_simulator_is_found(setting: Setting) -> None:
    batches = _gpu_training.read_batches(on_cpu(setting))
    tables = _gpu_systems.SYSTEMS["uvm"](on_cpu(setting))
    for batch in _gpu_training.ahead_of(batches, tables):
        tables.bags(batch.sparse)
    assert all_of(_gpu_live.hits(batches, tables.bags))["hits.equal_to_the_simulator"]
    assert not all_of(_gpu_live.hits(batches[:-1], tables.bags))["hits.equal_to_the_simulator"]
    tables.close()


def test_plans_are_measured_by_threads(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_parts, "_PLANNING", "--run-in 2 --rounds 2 --steps 2")
    found = all_of(_gpu_parts.planning(setting))
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["1_threads.planned_ms"] > 0
    assert found["ids"] == 26 * SIZES.batch_size


def test_plans_of_too_few_batches_are_refused(setting: Setting) -> None:
    with pytest.raises(RuntimeError, match="there are 12 batches, and planning needs 25; see --batches"):
        all_of(_gpu_parts.planning(setting))


def test_a_part_prints_what_it_has_found_when_it_fails(
    capsys: pytest.CaptureFixture[str], setting: Setting
) -> None:
    def fails(_: Setting) -> Figures:
        yield {"a": 1}
        raise RuntimeError("out of memory\n")

    with mock.patch.dict(_gpu_parts.PARTS, bits=_gpu_parts.Part("", 1, fails)):
        assert _gpu_parts.main("bits", setting) == 1
    out, where = capsys.readouterr()
    assert out.splitlines() == ['{"a": 1}', '{"a": 1, "failed": "RuntimeError: out of memory"}']
    assert 'raise RuntimeError("out of memory\\n")' in where
