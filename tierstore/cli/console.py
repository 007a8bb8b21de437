"""The ``tierstore`` command as a process: what Ctrl-C does while the command begins, and while it ends.

Nothing slow is imported here.
"""

import os
import signal
import sys

from tierstore.cli.interrupt import EXIT_INTERRUPTED


def console() -> int:
    """Run the command line of this process, which ends with the code that this function returns.

    Work that Ctrl-C has ended may take a moment until its threads are over, for which the interpreter waits.
    Ctrl-C in that moment ends the process at once: an interpreter that ended beside such threads would abort.
    """
    try:
        from tierstore.cli.main import main

        return main()
    except KeyboardInterrupt:  # while the command is imported, or while ``main`` tells of another one
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
