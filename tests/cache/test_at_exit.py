"""Objects end with the process, also where Ctrl-C interrupts the wait for them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from tierstore.cache.at_exit import end_at_exit


class Ending:
    calls = 0

    def __init__(self, name, error):
        self.name, self.error = name, error

    def end_at_exit(self):
        self.calls += 1
        if self.calls == 1:
            raise self.error
        print(self.name, "has ended", flush=True)


endings = [
    Ending("first", KeyboardInterrupt()), Ending("second", OSError()), Ending("third", KeyboardInterrupt())
]
for ending in endings:
    end_at_exit(ending)
"""


def test_ctrl_c_ends_no_wait_for_good() -> None:
    """Another error does: the object would raise it again."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["third has ended", "first has ended", ""]
    assert ended.stderr.count("Ctrl-C again ends the process before") == 2
    assert ended.stderr.count("did not end as it should: OSError()") == 1
