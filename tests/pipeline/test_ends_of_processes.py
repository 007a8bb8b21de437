"""However a training script ends: it ends, soon, with its own exit code, and without an abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

SCRIPT = Path(__file__).with_name("ending_script.py")
CODES = {"exception": 1, "full": 1, "exit": 3, "ctrl-c": -2}
SAYS = {"exception": "ValueError: the user's own", "full": "StoreFullError", "ctrl-c": "KeyboardInterrupt"}
WHERES = ["no-prefetch", "pulled", "in-forward", "after-backward"]
RARE = ["ctrl-c", "exit-in-a-thread", "thread-goes-on", "forked-child", "cycle", "closed", "full"]
ENDS = [(how, where) for how in ("break", "exception", "exit") for where in WHERES]


@pytest.mark.parametrize(("how", "where"), [*ENDS, *((how, "pulled") for how in RARE)])
def test_a_script_ends_with_its_own_exit_code(how: str, where: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable if where == "after-backward" else warm.python(),
            str(SCRIPT),
            how,
            where,
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == CODES.get(how, 0), ended.stderr
    for trouble in ("terminate", "Fatal", "Exception ignored"):
        assert trouble not in ended.stderr
    if how in SAYS:
        assert SAYS[how] in ended.stderr
    else:
        assert "Traceback" not in ended.stderr
        assert ("end of the script" in ended.stdout) == (how != "exit")
