"""Threads that are waited for again after signals have ended the first wait."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.source_files import ROOT, python_files
from tierstore.threads import Thread

LEAST = 0.5  # seconds


class Alarm(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("wait", [lambda thread: thread.join(), lambda thread: thread.join(60)])
def test_a_wait_that_was_interrupted_is_done_again(wait: Callable[[Thread], None]) -> None:
    goes_on = threading.Event()
    thread = Thread(target=goes_on.wait)

    def alarm(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        thread.start()
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm):
                wait(thread)
            assert thread.is_alive()
    finally:
        signal.signal(signal.SIGALRM, before)
    begin = time.monotonic()
    threading.Timer(LEAST, goes_on.set).start()
    wait(thread)
    assert time.monotonic() - begin >= LEAST
    assert not thread.is_alive()
    assert thread not in threading.enumerate()


def test_join_waits_no_longer_than_it_may() -> None:
    goes_on = threading.Event()
    thread = Thread(target=goes_on.wait)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="before it is started"):
        thread.join()
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    goes_on.set()
    thread.join()


def test_a_thread_does_not_wait_for_itself() -> None:
    errors: list[str] = []

    def wait() -> None:
        try:
            threading.current_thread().join()
        except RuntimeError as error:
            errors.append(str(error))

    thread = Thread(target=wait)
    thread.start()
    thread.join()
    assert errors == ["cannot join current thread"]


def test_a_forked_child_waits_for_none_of_its_parent() -> None:
    goes_on = threading.Event()
    thread = Thread(target=goes_on.wait)
    thread.start()
    child = os.fork()
    if child == 0:
        try:
            thread.join()
            thread.join(60)
            os._exit(int(thread.is_alive()))
        finally:
            os._exit(2)  # no child runs further tests, whatever is raised
    begin = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - begin < 30:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    goes_on.set()
    thread.join()
    assert ended == (child, 0)


def test_the_library_starts_no_other_threads() -> None:
    files = [path for path in python_files() if path.is_relative_to(ROOT / "tierstore")]
    assert not [path for path in files if re.search(r"(?<!\()threading\.Thread\(", path.read_text())]
