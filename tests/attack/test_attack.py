"""Random operations, call orders, interrupts, forks, small limits and ends of processes: nothing is lost.

``TIERSTORE_ATTACK_STEPS`` is the number of steps in all (``make crash-test``: 200,000).
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.in_memory import tmp_path  # noqa: F401  (a fixture: killed processes lose nothing of such files)

ROOT = Path(__file__).parents[2]
STEPS = int(os.environ.get("TIERSTORE_ATTACK_STEPS", "1500"))
OF_ONE_RUN = 1_500


@pytest.mark.timeout(600 + STEPS // 5)
def test_random_lives(tmp_path: Path) -> None:  # noqa: F811
    for number in range(-(-STEPS // OF_ONE_RUN)):
        seed, folder = random.randrange(1 << 32), tmp_path / str(number)
        folder.mkdir()
        command = [warm.python(), "-m", "tests.attack.machine", str(folder), str(OF_ONE_RUN), str(seed)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
