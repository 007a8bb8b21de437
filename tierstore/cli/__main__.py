"""``python -m tierstore.cli``: the ``tierstore`` command where its script is not on the path."""

import sys

from tierstore.cli.console import console

sys.exit(console())
