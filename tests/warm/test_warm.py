"""Processes that are forked begin and end as those of an interpreter do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm

SAYS_ALL = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["MARK"], sys.stdin.read(), __name__, sys.path[0])
print("error", file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "script.py"
    path.write_text(SAYS_ALL)
    return path


@pytest.mark.parametrize("form", ["script", "code", "module"])
def test_a_program_gets_what_an_interpreter_gives_it(form: str, script: Path, tmp_path: Path) -> None:
    arguments = {"script": [str(script)], "code": ["-c", SAYS_ALL], "module": ["-m", "script"]}[form]
    said = [
        subprocess.run(
            [python, *arguments, "a b", "-x"],
            cwd=tmp_path,
            env={**os.environ, "MARK": "here"},
            input="typed",
            capture_output=True,
            text=True,
            check=True,
        )
        for python in (sys.executable, warm.python())
    ]
    assert said[0].stdout == said[1].stdout
    assert said[0].stderr == said[1].stderr == "error\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_a_program_ends_as_it_would(code: str, status: int) -> None:
    for python in (sys.executable, warm.python()):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        assert done.returncode == status, done.stderr


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_program(number: signal.Signals) -> None:
    with subprocess.Popen([warm.python(), "-c", WAITS], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        process = int(command.stdout.readline())
        command.send_signal(number)
        assert command.wait(timeout=60) == -number
    end = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end, "the program goes on"
        time.sleep(0.01)


def test_torch_is_there_before_the_program() -> None:
    code = "import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    assert subprocess.check_output([warm.python(), "-c", code], text=True).split() == ["True", "True"]
