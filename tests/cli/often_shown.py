"""``tierstore`` whose progress is shown every second, for tests that wait until a training goes on."""

from __future__ import annotations

import sys

from tierstore.cli import progress
from tierstore.cli.main import main

if __name__ == "__main__":
    progress.LOG_INTERVAL = 1.0
    sys.exit(main())
