"""``tierstore`` that holds few examples out, and shows its progress as often as SHOWN_EVERY_S says."""

from __future__ import annotations

import os
import sys

import tierstore.data.synthetic
from tierstore.cli import progress
from tierstore.cli.main import main

if __name__ == "__main__":
    progress.LOG_INTERVAL = float(os.environ.get("SHOWN_EVERY_S", progress.LOG_INTERVAL))
    tierstore.data.synthetic.TEST_EXAMPLES = 4096
    sys.exit(main())
