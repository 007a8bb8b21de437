"""Ctrl-C once, twice and more often, while a command's thread is in native code: no abort, exit code 130."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 3.0
SCRIPT = f"""
import sys
import numpy as np
from tierstore import _core
from tierstore.cli import inspect
from tierstore.cli.console import console
from tierstore.cli.storage import run_while_waiting
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

folder = sys.argv.pop()
env = _core.FaultEnv(_core.posix_env(folder))
config = NativeConfig(cap_bytes=1 << 30)
tables = (StoredTable("a", 0, 1000, 64, 256),)
store = NativeStore(folder, tables, config=config, env=env)
keys = make_keys(0, [7])
store.write(keys, np.ones((1, 256), np.uint8))
store.commit(b"")
store.close()
store = NativeStore(folder, tables, config=config, env=env)


def read():
    env.slow_down({SECONDS})
    print("begins", flush=True)
    store.read(keys, np.zeros((1, 256), np.uint8))
    print("has ended", flush=True)


inspect.run = lambda args: run_while_waiting("reading", read, lambda: None)
sys.argv[1:] = ["inspect", folder]
sys.exit(console())
"""


@pytest.mark.parametrize("interrupts", [1, 2, 3, 4])
def test_the_command_ends_without_an_abort(interrupts: int, tmp_path: Path) -> None:
    """After one Ctrl-C, or two, the command waits for its thread; the third ends it."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    (tmp_path / "store").mkdir()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, restore_signals=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        begin = time.monotonic()
        for _ in range(interrupts):
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        seconds = time.monotonic() - begin
    assert process.returncode == 130, err
    assert "terminate" not in err
    assert "Traceback" not in err
    assert out == ("has ended\n" if interrupts < 3 else "")
    assert (seconds >= SECONDS * 0.9) == (interrupts < 3)


def test_while_the_command_is_imported() -> None:
    code = (
        "import builtins, signal, sys\n"
        "from tierstore.cli.console import console\n"
        "real = builtins.__import__\n"
        "def hook(name, *more, **named):\n"
        "    if name == 'tierstore.cli.arguments':\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *more, **named)\n"
        "builtins.__import__ = hook\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(console())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
