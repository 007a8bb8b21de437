"""Objects end with the process, also where Ctrl-C interrupts the wait for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from tierstore.cache.at_exit import end_at_exit


class Ending:
    def __init__(self, name, *errors):
        self.name, self.errors = name, list(errors)

    def end_at_exit(self):
        if self.errors:
            raise self.errors.pop(0)
        print(self.name, "has ended")


interrupts = [KeyboardInterrupt()] * int(sys.argv[1])
endings = [Ending("first", *interrupts), Ending("second", OSError()), Ending("third", KeyboardInterrupt())]
for ending in endings:
    end_at_exit(ending)
"""


@pytest.mark.parametrize(("interrupts", "code"), [(1, 0), (2, 130)])
def test_ctrl_c_ends_no_wait_for_good(interrupts: int, code: int) -> None:
    """Another error does: the object would raise it again. Ctrl-C in the second wait ends the process."""
    command = [sys.executable, "-c", SCRIPT, str(interrupts)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stdout == "third has ended\n" + (interrupts == 1) * "first has ended\n"
    assert ended.stderr.count("Ctrl-C once more ends the process at once") == 2
    assert ended.stderr.count("did not end as it should: OSError()") == 1
