"""The ``tierstore`` command as a process: what Ctrl-C does while the command begins, and while it ends.

Nothing slow is imported here.
"""

import io
import os
import signal
import sys
from typing import TextIO

from tierstore.cli.interrupt import EXIT_INTERRUPTED

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_EXIT_WITHOUT_READER = 128 + signal.SIGPIPE  # as of programs that the signal ends


def console() -> int:
    """Run the command line of this process, which ends with the code that this function returns.

    Work that Ctrl-C has ended may take a moment until its threads are over, for which the interpreter waits.
    Ctrl-C in that moment ends the process at once: an interpreter that ended beside such threads would abort.
    """
    _open_streams()
    sys.stderr = _through(_Lossy, sys.stderr, line_buffering=True)
    sys.stdout = _through(_Named, sys.stdout, line_buffering=bool(sys.stdout.line_buffering))
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]  # of a shell that does not know the width; rich would print nothing
    try:
        from tierstore.cli.main import main

        return main()
    except KeyboardInterrupt:  # while the command is imported, or while ``main`` tells of another one
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone (`| head`)
        return _without_reader()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends programs with 1, the code of damage
            return _without_reader()
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


def _open_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed (``>&-``).

    Else the store's files would take the numbers of these streams, and what native code prints to a stream
    would be written into them. Python has None for such a stream.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _without_reader() -> int:
    """Empty the streams, and return the exit code. Else Python would complain of a broken pipe, and exit with
    120, when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return _EXIT_WITHOUT_READER


def _through(file: type[io.FileIO], stream: TextIO, line_buffering: bool) -> TextIO:
    """Return a stream to the file of ``stream``, which treats errors as ``file`` does."""
    raw = io.BufferedWriter(file(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        raw, encoding=stream.encoding, errors=stream.errors, line_buffering=line_buffering
    )


class _Named(io.FileIO):
    """An error of standard output says where it was, as errors of other files do. It is raised once: the
    interpreter would raise it again when it ends."""

    failed = False

    def write(self, data):  # type: ignore[no-untyped-def]  # of any object with bytes
        if self.failed:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.failed = True
            raise OSError(error.errno, error.strerror, "standard output") from error


class _Lossy(io.FileIO):
    """A training goes on when the disk of its log is full; the exit code says what became of the work."""

    def write(self, data):  # type: ignore[no-untyped-def]  # of any object with bytes
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)
