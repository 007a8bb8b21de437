"""The thread pool of the core, seen through a kernel: concurrent callers, forks, changing thread counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tierstore import _core as core

ROW_BYTES = 256
N = 20_000


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = core.num_threads()
    yield
    core.set_num_threads(before)


class Copies:
    """Rows and the copy that every run of a kernel must make of them."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = rng.integers(0, 256, (N, ROW_BYTES), dtype=np.uint8)
        self.slots = rng.permutation(N).astype(np.int32)

    def check(self) -> None:
        out = np.zeros_like(self.rows)
        core.HostRows.view(self.rows).copy_out(self.slots, out)
        np.testing.assert_array_equal(out, self.rows[self.slots])


def test_default_is_bounded() -> None:
    assert 1 <= core.num_threads() <= 8


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_thread_count_is_validated(n: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        core.set_num_threads(n)


def test_thread_count_may_change_between_calls() -> None:
    copies = Copies(0)
    for n in (4, 1, 2, 7, 3):
        core.set_num_threads(n)
        assert core.num_threads() == n
        copies.check()


def test_concurrent_callers_share_the_pool() -> None:
    core.set_num_threads(3)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            copies = Copies(seed)
            for _ in range(20):
                copies.check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_forked_child_makes_its_own_threads() -> None:
    core.set_num_threads(3)
    copies = Copies(1)
    copies.check()
    child = os.fork()
    if child == 0:
        try:
            for _ in range(5):
                copies.check()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    copies.check()
