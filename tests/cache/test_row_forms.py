"""Tables whose rows take fewer bytes in lower tiers: when rows are rounded, and what does not matter."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tests.bags import ROWS, Bags, budget, build, everything, random_batches, train
from tests.cache.test_faults import make_fail
from tierstore import TableOverride, TierConfig, optim, prefetch
from tierstore import _core as core
from tierstore.cache.engine import Engine, Table
from tierstore.cache.tiers.codec import converted
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.errors import ConfigError, StoreIOError, StoreMismatchError
from tierstore.initializers import constant, uniform
from tierstore.keys import make_keys
from tierstore.row_format import RowFormat

ADAM = optim.Adam(lr=0.1)
ADAGRAD = optim.RowWiseAdagrad(lr=0.3)
DTYPES = ["bf16", "fp16", "int8"]
FORMATS = [*((dtype, "fp32") for dtype in DTYPES), ("bf16", "bf16"), ("int8", "bf16"), ("fp32", "bf16")]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
formats = pytest.mark.parametrize(("dtype", "state"), FORMATS)


def short(dtype: str, state: str = "fp32", slots: int = 40, **more: Any) -> TierConfig:
    given = {"hbm": budget(slots, ADAM), "engine": "memory", "ssd_dtype": dtype, "state_dtype": state}
    return TierConfig(**{**given, **more})


def uvm_bytes(slots: int, dtype: str, state: str) -> int:
    return bytes_for(slots, RowFormat(dtype, state).row_bytes(5, 10), "lookahead")


def steps(module: Bags, batches: list[Any], ahead: bool) -> list[torch.Tensor]:
    if not ahead:
        return train(module, batches)
    loader = prefetch(batches, module, depth=2, window=5, inputs={"": lambda batch: (batch,)})
    return [out for ids in loader for out in train(module, [ids])]


def result(config: TierConfig, batches: list[Any], ahead: bool = False) -> list[torch.Tensor]:
    with build(config, ADAM, (5,)) as module:
        return [*steps(module, batches, ahead), *everything(module)]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
@formats
def test_it_does_not_matter_where_below_the_first_tier_a_row_was(
    dtype: str, state: str, ahead: bool, tmp_path: Path
) -> None:
    batches = random_batches(4, 30, 1, 6, 3)
    want = result(short(dtype, state), batches, ahead)
    assert not equal(want, result(short("fp32"), batches, ahead))
    uvm = {"uvm": uvm_bytes(30, dtype, state), "uvm_dtype": dtype}
    assert equal(want, result(short(dtype, state, **uvm), batches, ahead))
    files = {"engine": "native", "path": tmp_path / "rows", "ssd": "64MiB"}
    assert equal(want, result(short(dtype, state, **files), batches, ahead))
    none = {"read_ahead": 0, "ssd": 0, "uvm": uvm_bytes(5000, dtype, state), "uvm_dtype": dtype}
    assert equal(want, result(short(dtype, state, **none), batches, ahead))


@formats
def test_rows_are_rounded_alike_with_any_threads_and_again(dtype: str, state: str) -> None:
    batches, before = random_batches(5, 25, 1, 6, 3), core.num_threads()
    try:
        found = []
        for threads in (1, 3):
            tierstore.set_num_threads(threads)
            found.append(result(short(dtype, state), batches))
    finally:
        tierstore.set_num_threads(before)
    assert equal(*found)
    assert not equal(found[0], result(short(dtype, state, stochastic_rounding=False), batches))


@formats
def test_commits_change_nothing_and_hold_what_lower_tiers_would(
    dtype: str, state: str, tmp_path: Path
) -> None:
    batches = random_batches(6, 30, 1, 6, 3)
    want = result(short(dtype, state), batches)
    config = short(dtype, state, engine="native", path=tmp_path / "rows", ssd="64MiB")
    with build(config, ADAM, (5,)) as module:
        outputs = train(module, batches[:15])
        commit = module.commit({"step": 15})
        rounded = below(module, everything(module))
        outputs += train(module, batches[15:])
        assert equal([*outputs, *everything(module)], want)
        module.engine.go_to(commit)
        assert equal(everything(module), rounded)
        module.flush()
        assert equal(everything(module), rounded)
        module.close()
    with build(config, ADAM, (5,)) as module:
        assert equal(everything(module), rounded)
        ids = torch.arange(ROWS)
        module.load_rows(ids, module.rows(ids))  # what was read goes back as it was
        module.engine.flush()
        module.engine.go_to(module.engine.commit())
        assert equal(everything(module), rounded)


def below(module: Bags, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values that rows of ``parts`` (weights, and two states) have when they come back."""
    codec = module.engine.groups[0].layout.codec
    assert codec is not None
    wide = np.zeros((ROWS, codec.wide_bytes // 4), np.float32)
    wide[:, :15] = torch.cat([part.view(ROWS, 5) for part in parts], 1).numpy()
    keys, rows = make_keys(0, np.arange(ROWS)), wide.view(np.uint8)
    found = converted(keys, converted(keys, rows, None, codec), codec, None).view(np.float32)
    return [torch.from_numpy(found[:, first : first + 5].copy()) for first in (0, 5, 10)]


@pytest.mark.parametrize("uvm", [False, True])
@dtypes
def test_rows_that_were_never_updated_are_the_same_everywhere(dtype: str, uvm: bool) -> None:
    more = {"uvm": uvm_bytes(30, dtype, "fp32"), "uvm_dtype": dtype} if uvm else {}
    with build(short(dtype, **more), ADAM, (5,)) as module:
        before = everything(module)
        assert equal(before, below(module, before))
        with torch.no_grad():
            module.eval()([torch.arange(100).view(10, 10)])
        module.train()
        for batch in random_batches(9, 20, 1, 6, 3):
            module(batch)  # rows come and go
        assert equal(everything(module), before)
        plain = build(TierConfig(hbm="all"), ADAM, (5,))
        assert all(torch.allclose(a, b, atol=0.01) for a, b in zip(before, everything(plain), strict=True))


@dtypes
def test_host_memory_in_float32_rounds_nothing(dtype: str) -> None:
    """Rows are rounded where they leave the last float32 tier."""

    def built(config: TierConfig) -> Bags:
        engine = Engine([Table("t0", ROWS, 5, constant(0.0))], config, ADAM, seed=3)
        return Bags(engine, range(1), ADAM)

    batches = random_batches(4, 30, 1, 6, 3)
    reference = built(TierConfig(hbm="all"))
    want = [*train(reference, batches), *everything(reference)]
    with built(short(dtype, uvm=budget(5000, ADAM))) as module:
        assert equal([*train(module, batches), *everything(module)], want)
        assert module.stats()["tiers"]["uvm"]["row_hits"] > 0
    with built(short(dtype, uvm=budget(30, ADAM))) as module:
        assert not equal([*train(module, batches), *everything(module)], want)


def test_tables_without_a_lower_tier_are_float32() -> None:
    """Host memory that no table takes rounds nothing, initial values included."""
    kept = {"t0": TableOverride(hbm=budget(5000, ADAM))}
    resident = TierConfig(hbm=budget(5000, ADAM), uvm=1 << 20, uvm_dtype="int8", ssd=0, tables=kept)
    batches = random_batches(4, 10, 1, 6, 3)
    with build(resident, ADAM, (5,)) as module:
        assert len(module.engine.groups[0].stack.tiers) == 1
    assert equal(result(resident, batches), result(TierConfig(hbm="all"), batches))


@formats
def test_training_is_near_training_in_float32(dtype: str, state: str) -> None:
    batches = random_batches(8, 60, 1, 8, 3)

    def trained(config: TierConfig) -> list[torch.Tensor]:
        with build(config, ADAGRAD, (5,)) as module:
            return [*train(module, batches), *everything(module)]

    want, got = trained(TierConfig(hbm="all")), trained(short(dtype, state, hbm=budget(40, ADAGRAD)))
    size = {"bf16": 2**-6, "fp16": 2**-9, "int8": 2**-4, "fp32": 2**-5}[dtype]
    for a, b in zip(want, got, strict=True):
        assert (a - b).abs().mean() < size * a.abs().mean()


def test_sizes_are_those_of_the_rows_that_are_held(tmp_path: Path) -> None:
    files = {"engine": "native", "path": tmp_path / "rows", "ssd": "64MiB", "read_ahead": "1MiB"}
    uvm = {"uvm": uvm_bytes(300, "int8", "bf16"), "uvm_dtype": "int8"}
    with build(short("int8", "bf16", **uvm, **files), ADAM, (5,)) as module:
        train(module, random_batches(4, 30, 1, 60, 3))
        module.commit()
        stats = module.stats()
        size = RowFormat("int8", "bf16").row_bytes(5, 10)
        assert size == 48  # 5 weights and 3 bytes to align them, 8 for step and offset, 20 for the state
        assert stats["store"]["live_bytes"] == size * stats["store"]["rows"]
        assert stats["groups"]["dim5"]["row_bytes"] == 64  # 60, padded
        assert stats["groups"]["dim5"]["stored_row_bytes"] == size
        (spec,) = module.engine.specs
        assert (spec.row_bytes, spec.weight_dtype, spec.state_dtype) == (size, "int8", "bf16")
        (group,) = module.engine.groups
        tier: Any = group.stack.tiers[1]
        assert tier.capacity == 300
        metadata = tier.native.metadata_bytes + tier._policy_bytes
        assert stats["memory"]["uvm"] == 300 * size + metadata


def test_a_store_is_opened_with_its_own_dtypes(tmp_path: Path) -> None:
    config = short("bf16", engine="native", path=tmp_path / "rows", ssd="64MiB")
    build(config, ADAM, (5,)).close()
    for other, what in (
        ({"ssd_dtype": "fp32"}, "weight_dtype is 'bf16' there, but 'fp32'"),
        ({"ssd_dtype": "fp16"}, "weight_dtype is 'bf16' there, but 'fp16'"),
        ({"state_dtype": "bf16"}, "state_dtype is 'fp32' there, but 'bf16'"),
    ):
        with pytest.raises(StoreMismatchError, match=what):
            build(replace(config, **other), ADAM, (5,))
    build(replace(config, stochastic_rounding=False), ADAM, (5,)).close()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"ssd_dtype": "fp8"}, "ssd_dtype is 'fp8'; it must be one of fp32, bf16, fp16, int8"),
        ({"uvm_dtype": torch.bfloat16}, "uvm_dtype is torch.bfloat16"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8'; it must be one of fp32, bf16"),
        ({"ssd_dtype": "bf16", "uvm_dtype": "fp16", "uvm": 1 << 20}, "rounded twice"),
        ({"uvm_dtype": "int8", "uvm": 1 << 20}, 'twice; give uvm_dtype="fp32" or ssd_dtype="int8"'),
        ({"stochastic_rounding": 1}, "must be True or False"),
    ],
)
def test_wrong_dtypes(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TierConfig(**given)


def test_rows_that_int8_cannot_hold_become_nan_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with build(short("int8"), optim.SGD(lr=0.1), (5,)) as module:
        before = module.rows(torch.arange(2000))
        bad = torch.tensor([7, 8])
        module.load_rows(bad, torch.tensor([[1.0, np.nan, 0, 0, 0], [np.inf, 1, 0, 0, 0]]))
        with caplog.at_level(logging.WARNING, "tierstore"):
            train(module, [[torch.arange(first, first + 30).view(1, 30)] for first in range(100, 1000, 30)])
        assert module.rows(bad).isnan().all()
        assert [record for record in caplog.records if "row 7 of table" in record.getMessage()]
        assert len(caplog.records) == 1
        assert torch.equal(module.rows(torch.arange(1500, 2000)), before[1500:])


def test_seeds_and_initial_values_of_shards_are_those_of_their_table() -> None:
    """A shard of rows rounds as the whole table does: ids and seed are the table's."""
    rows = []
    for name, origin in (("t0", None), ("t0/part", "t0")):
        table = Table(name, ROWS, 5, uniform(-0.5, 0.5), origin)
        with Bags(Engine([table], short("bf16"), ADAM, seed=3), range(1), ADAM) as module:
            rows.append([*train(module, random_batches(4, 20, 1, 6, 3)), *everything(module)])
    assert equal(*rows)


EXACT = optim.SGD(lr=0.125)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(16, 90),
    uvm=st.sampled_from([0, 30]),
    dtype=st.sampled_from(DTYPES),
    host=st.sampled_from(["fp32", "the same"]),
    ahead=st.booleans(),
    fail_at=st.sets(st.integers(1, 60), max_size=20),
)
def test_numbers_that_a_form_has_train_as_in_memory(
    seed: int, slots: int, uvm: int, dtype: str, host: str, ahead: bool, fail_at: set[int]
) -> None:
    """All weights are multiples of 1/8, so rounding changes none. No row is lost, mixed up or of an old
    version, also where batches do not fit and the store fails."""

    def built(config: TierConfig) -> Bags:
        return Bags(Engine([Table("t0", ROWS, 5, constant(0.0))], config, EXACT, seed=3), range(1), EXACT)

    batches = random_batches(seed, 15, 1, 6, 3)
    reference = built(TierConfig(hbm="all"))
    want = [counted(reference, ids) for ids in batches]
    config = TierConfig(
        hbm=budget(slots), uvm=budget(uvm) if uvm else 0, engine="memory", ssd_dtype=dtype,
        uvm_dtype=dtype if host == "the same" else "fp32",
    )  # fmt: skip
    with built(config) as module:
        store = make_fail(module, set() if ahead else fail_at)
        loader: Any = batches
        if ahead:
            loader = prefetch(batches, module, depth=2, window=4, inputs={"": lambda batch: (batch,)})
        for ids, expected in zip(loader, want, strict=True):
            while True:
                try:
                    assert torch.equal(counted(module, ids), expected)
                    break
                except StoreIOError:
                    continue
        store.fail_at = set()
        assert equal(everything(module), everything(reference))


def counted(module: Bags, ids: Any) -> torch.Tensor:
    """Take 1/8 off every weight of a row for each time that it is used."""
    out = module(ids)
    out.sum().backward()
    return out.detach().clone()
