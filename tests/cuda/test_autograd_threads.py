"""Autograd has a thread for each GPU: there it calls our backward functions, while who calls ``backward()``
waits. Without a GPU another thread of Python takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import Variable

from tests.cuda.fake_torch import fake_torch
from tests.cuda.module_runs import RUNS
from tests.cuda.test_modules_on_gpu import on_host, said_once, same, trained
from tierstore.modules import lookup_ops
from tierstore.modules.lookup import PooledFunction, SequenceFunction

__all__ = ["said_once"]
_SECONDS = 60.0


def _elsewhere(plain: Callable[..., Any], ran: list[str]) -> Callable[..., Any]:
    """Return ``plain``, a backward function, as one that another thread runs."""

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with_grad, (anchor, _) = torch.is_grad_enabled(), ctx.next_functions[0]
        trains = anchor is not None and torch._C._will_engine_execute_node(anchor)
        found: list[Any] = []

        def run() -> None:
            ran.append(plain.__qualname__)
            try:
                with torch.set_grad_enabled(with_grad):
                    found.append(plain(ctx, *grads))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run, daemon=True)
        with mock.patch.object(torch._C, "_will_engine_execute_node", return_value=trains):
            thread.start()
            thread.join(_SECONDS)
        assert found, "the backward function waits for its caller's thread"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return backward


@contextmanager
def threads_of_autograd() -> Iterator[list[str]]:
    """Yield the names of the backward functions that have run."""
    ran: list[str] = []
    with ExitStack() as stack:
        for function in (PooledFunction, SequenceFunction):
            there = staticmethod(_elsewhere(function.backward, ran))
            stack.enter_context(mock.patch.object(function, "backward", there))
        yield ran


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["rows", "max", "collection", "weighted", "sequences", "bags of fp16"])
def test_a_module_trains_in_autograds_thread(name: str, prefetch: bool) -> None:
    expected = on_host(name, prefetch)
    with fake_torch("random", seed=6), threads_of_autograd() as ran:
        found = trained(name, "cuda:0", prefetch=prefetch)
    same(found, expected)
    assert len(ran) >= 13


@pytest.mark.parametrize("run", ["a checkpoint is restored", "two modules take turns"])
def test_a_run_in_autograds_threads(run: str, tmp_path: Any) -> None:
    devices = 2 if "two" in run else 1
    with fake_torch("lazy", seed=6, devices=devices), threads_of_autograd() as ran:
        RUNS[run](tmp_path, "cuda:0")
    assert ran


def test_what_orders_updates_ends_with_its_pass_whichever_thread_ends_it() -> None:
    ends: list[Callable[[], object]] = []
    engine = mock.Mock(queue_callback=ends.append)
    with mock.patch.object(Variable, "_execution_engine", engine), ThreadPoolExecutor(1) as of_gpu:
        for number in range(2):
            assert of_gpu.submit(lambda: lookup_ops._backward.done).result() is None
            of_gpu.submit(lookup_ops._backward.then, torch.zeros(1)).result()
            of_gpu.submit(lookup_ops._backward.then, torch.ones(1)).result()
            assert of_gpu.submit(lambda: lookup_ops._backward.done).result() == 1
            assert len(ends) == number + 1
            ends[-1]()  # in this thread
