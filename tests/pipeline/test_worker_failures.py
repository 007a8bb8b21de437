"""What fails in a thread of a prefetch is told by the forward call that needed it, whatever it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.bags import SGD, Bags, budget, build, everything, random_batches
from tierstore import TierConfig, TieredEmbeddingBag
from tierstore.cache.group import TierGroup
from tierstore.cache.row_moves import RowMoves
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.errors import InputError
from tierstore.pipeline.learning import tensors_of
from tierstore.pipeline.planned import RecentBatches
from tierstore.pipeline.prefetch import prefetch
from tierstore.pipeline.windows import Window
from tierstore.pipeline.worker import Worker

BATCHES = random_batches(3, 12, 1, 6, 3)
FAILURES = [ZeroDivisionError, AssertionError, MemoryError, OSError, KeyboardInterrupt, SystemExit]


def train_again(module: Bags, inputs: Any, kind: type[BaseException]) -> int:
    """Trains with prefetch and repeats steps that fail; how many did. The rows are those of memory."""
    failed = 0
    reference = build(TierConfig(hbm="all"), SGD, (5,))
    for ids in prefetch(BATCHES, module, depth=2, window=4, inputs=inputs):
        try:
            out = module(ids)
        except kind:
            failed += 1
            out = module(ids)
        out.sin().sum().backward()
        reference(ids).sin().sum().backward()
    for a, b in zip(everything(module), everything(reference), strict=True):
        assert torch.equal(a, b)
    return failed


def bags(slots: int = 40) -> Bags:
    return build(TierConfig(hbm=budget(slots), engine="memory"), SGD, (5,))


@pytest.mark.parametrize("kind", FAILURES)
def test_the_function_of_inputs_fails(kind: type[BaseException]) -> None:
    def inputs(batch: Any) -> Any:
        if batch is BATCHES[4] or batch is BATCHES[9]:
            raise kind
        return (batch,)

    with bags() as module:
        assert train_again(module, {"": inputs}, kind) == 2


@pytest.mark.parametrize("kind", [LookupError, TypeError, ValueError])
def test_a_batch_of_another_structure_is_looked_up_on_demand(kind: type[Exception]) -> None:
    def inputs(batch: Any) -> Any:
        if batch is BATCHES[4]:
            raise kind
        return (batch,)

    with bags() as module:
        assert train_again(module, {"": inputs}, kind) == 0


def failing(call: Callable[..., Any], at: int, kind: type[BaseException]) -> Callable[..., Any]:
    """Fails at the call with this number of those in the threads of a prefetch."""
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        if threading.current_thread().name.startswith("tierstore-"):
            calls += 1
            if calls == at:
                raise kind
        return call(*args, **options)

    return wrapped


STEPS = [
    *((TierGroup, step) for step in ("announce", "_plan", "_begin", "_find_victims", "_count")),
    *((RowMoves, step) for step in ("make_room", "demote", "fill")),
]


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_step_of_a_plan_fails(
    owner: type, step: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bags() as module:
        monkeypatch.setattr(owner, step, failing(getattr(owner, step), 5, kind))
        failed = train_again(module, {"": lambda batch: (batch,)}, kind)
        assert failed == 1


STEPS = [
    *((Worker, step) for step in ("_prepare", "_prepare_call", "_can_plan", "_announce")),
    (Window, "add"),
    *((RecentBatches, step) for step in ("add", "pinned_since")),
]


def late(do_next: Callable[[Worker], bool]) -> Callable[[Worker], bool]:
    """The training thread reaches the batch that failed before the worker has noted its error."""

    def wrapped(worker: Worker) -> bool:
        try:
            return do_next(worker)
        except BaseException:
            time.sleep(0.2)
            raise

    return wrapped


@pytest.mark.parametrize("is_late", [False, True], ids=["", "late"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[f"{owner.__name__}.{step}" for owner, step in STEPS])
def test_the_worker_itself_fails(
    owner: type, step: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bags() as module:
        monkeypatch.setattr(owner, step, failing(getattr(owner, step), 4, ZeroDivisionError))
        if is_late:
            monkeypatch.setattr(Worker, "_do_next", late(Worker._do_next))
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  (in any step of the loop)
            for ids in prefetch(BATCHES, module, depth=2, window=4, inputs={"": lambda batch: (batch,)}):
                module(ids).sum().backward()
        monkeypatch.undo()
        assert train_again_after(module)


def train_again_after(module: Bags, inputs: Any = {"": lambda batch: (batch,)}) -> bool:  # noqa: B006
    seen = 0
    for ids in prefetch(BATCHES, module, depth=2, window=4, inputs=inputs):
        module(ids).sum().backward()
        seen += 1
    return seen == len(BATCHES)


@pytest.mark.parametrize("step", ["_choose", "_is_due"])
@pytest.mark.parametrize(("kind", "told"), [(MemoryError, 0), (ZeroDivisionError, 1), (SystemExit, 1)])
def test_reading_ahead_fails(
    step: str, kind: type[BaseException], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is short of memory is done without; what is not foreseen is told."""
    with bags(20) as module:
        module.load_rows(torch.arange(1000), torch.randn(1000, 5))
        monkeypatch.setattr(ReadAhead, step, failing(getattr(ReadAhead, step), 2, kind))
        errors = 0
        for ids in prefetch(BATCHES, module, depth=1, window=6, inputs={"": lambda batch: (batch,)}):
            try:
                out = module(ids)
            except kind:
                errors += 1
                out = module(ids)
            out.sum().backward()
        assert errors == told


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with bags(20) as module:
        module.load_rows(torch.arange(1000), torch.randn(1000, 5))
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(prefetch(BATCHES, module, depth=1, window=6, inputs={"": lambda batch: (batch,)}))
        monkeypatch.undo()
        assert train_again_after(module)


def test_no_thread_to_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    with bags(20) as module:
        module.load_rows(torch.arange(1000), torch.randn(1000, 5))
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            if thread.name == "tierstore-read-ahead":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)
        assert train_again_after(module)
        assert np.isfinite(module.rows(torch.arange(1000)).numpy()).all()


def test_inference_mode_before_the_training_forward() -> None:
    with bags() as module, build(TierConfig(hbm="all"), SGD, (5,)) as memory:
        with torch.inference_mode():
            validation = [ids.clone() for ids in BATCHES[0]]
        for ids in prefetch(BATCHES, module, depth=2, window=4, inputs={"": lambda batch: (batch,)}):
            with torch.inference_mode():
                assert torch.equal(module(validation), memory(validation))
                assert torch.equal(module(ids), memory(ids))
            for bags_ in (module, memory):
                bags_(ids).sin().sum().backward()
        for a, b in zip(everything(module), everything(memory), strict=True):
            assert torch.equal(a, b)


def test_a_loader_whose_batches_are_inference_tensors() -> None:
    with torch.inference_mode():
        made = [[ids.clone() for ids in batch] for batch in BATCHES]
    with bags() as module, build(TierConfig(hbm="all"), SGD, (5,)) as memory:
        for ids in prefetch(made, module, depth=2, window=4, inputs={"": lambda batch: (batch,)}):
            for bags_ in (module, memory):
                bags_(ids).sin().sum().backward()
        for a, b in zip(everything(module), everything(memory), strict=True):
            assert torch.equal(a, b)


def test_a_loader_that_fills_one_buffer_again_and_again() -> None:
    """Its batches are all pulled, and changed behind torch's back, before the first is used."""
    buffer = [torch.zeros_like(BATCHES[0][0])]

    def refilled() -> Any:
        for batch in BATCHES:
            buffer[0].numpy()[:] = batch[0].numpy()
            yield buffer

    with bags() as module, build(TierConfig(hbm="all"), SGD, (5,)) as memory:
        for ids in prefetch(refilled(), module, depth=2, window=4, inputs={"": lambda batch: (batch,)}):
            for bags_ in (module, memory):
                bags_(ids).sin().sum().backward()
        for a, b in zip(everything(module), everything(memory), strict=True):
            assert torch.equal(a, b)


def warnings_of(module: Bags, inputs: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a pass over the batches, and a second one, say at level WARNING or above."""
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert train_again_after(module, inputs)
        assert train_again_after(module, inputs)
    return [record.getMessage() for record in caplog.records if record.name == "tierstore"]


@pytest.mark.parametrize("kind", [LookupError, AttributeError, TypeError, ValueError, RuntimeError])
def test_a_function_of_inputs_that_fails_is_told_once(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def inputs(batch: Any) -> Any:
        raise kind("no column of that name")

    with bags() as module:
        (said,) = warnings_of(module, {"": inputs}, caplog)
        assert said == (
            "Bags (tables t0): its function in prefetch(..., inputs=...) has failed for a batch, or has "
            f"returned what cannot be looked up ({kind.__name__}: no column of that name), so the batch is "
            "not prefetched; let the function return the arguments of the module's forward call for every "
            "batch. (said once)"
        )


def test_a_function_of_inputs_that_returns_something_else_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bags() as module:
        (said,) = warnings_of(module, {"": lambda batch: ("nothing to look up",)}, caplog)
        assert "has returned what cannot be looked up" in said


def learned_pass(batches: list[dict[str, torch.Tensor]]) -> tuple[int, list[str]]:
    """How many forward calls fail where a batch tells the ids, and what is logged."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, failed = Kept(logging.WARNING), 0
    logger = logging.getLogger("tierstore")
    logger.addHandler(handler)
    with TieredEmbeddingBag(2000, 5, config=TierConfig(hbm="1MiB", engine="memory"), optimizer=SGD) as bag:
        for batch in prefetch(batches, bag, depth=2, window=4):
            try:
                bag(next(iter(batch.values()))).sum().backward()
            except InputError:
                failed += 1
    logger.removeHandler(handler)
    return failed, said


def test_a_batch_of_another_structure_than_the_first_is_told_once() -> None:
    named = [{"ids" if step < 6 else "keys": batch[0]} for step, batch in enumerate(BATCHES)]
    failed, (said,) = learned_pass(named)
    assert failed == 0
    assert "a batch has another structure than the first one (KeyError: 'ids'), so it is not" in said


def test_wrong_ids_are_told_by_the_forward_call_alone() -> None:
    wrong = BATCHES[5][0].clone()
    wrong[0, 0] = 1 << 40
    named = [{"ids": wrong if step == 5 else batch[0]} for step, batch in enumerate(BATCHES)]
    assert learned_pass(named) == (1, [])


def tensors_of_every_layout() -> list[torch.Tensor]:
    square = torch.eye(4, dtype=torch.int64)
    pieces = [torch.arange(2), torch.arange(3)]
    compressed = [
        square.to_sparse_csr(),
        square.to_sparse_csc(),
        square.to_sparse_bsr(2),
        square.to_sparse_bsc(2),
    ]
    nested = [torch.nested.nested_tensor(pieces, layout=kind) for kind in (torch.strided, torch.jagged)]
    return [square.to_sparse(), *compressed, *nested, torch.eye(4).to_mkldnn(), torch.empty(4, device="meta")]


def test_batches_may_have_tensors_of_every_layout_beside_their_ids() -> None:
    named = [{"ids": batch[0], "others": tensors_of_every_layout()} for batch in BATCHES]
    assert learned_pass(named) == (0, [])  # type: ignore[arg-type]
    assert sum(tensor.nbytes for tensor in tensors_of(tensors_of_every_layout())) == 632
