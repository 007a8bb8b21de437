"""Forks the processes of :mod:`tests.warm`, until its input ends.

``python -m tests.warm.server SOCKET READY`` writes to the file READY as soon as commands may connect.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.run
import torchrec  # noqa: F401

import tierstore.torchrec  # noqa: F401
from tierstore.cli.main import main  # noqa: F401
from tierstore.cli.setup import finish_imports

MAIN = sys.modules["__main__"]  # kept for as long as the process of another one lives


def serve(path: str, ready: int) -> dict[str, Any] | None:
    """Fork a process per connection; return its request in the fork, None when the input has ended."""
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(path)
        listening.listen(64)
        os.write(ready, b"listens")
        os.close(ready)
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for file in (listening, woken, sys.stdin):
            selector.register(file, selectors.EVENT_READ)
        clients: dict[int, socket.socket] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for process in clients:
                        os.kill(process, signal.SIGKILL)
                    return None
                if key.fileobj is woken:
                    woken.recv(4096)
                    _answer(clients, selector)
                elif key.fileobj is listening:
                    client = listening.accept()[0]
                    request, files = _read(client)
                    process = os.fork() if request else -1
                    if not process:
                        return _begin(request, files)
                    for file in files:
                        os.close(file)
                    if request:
                        _tell(client, process)
                        clients[process] = client
                        selector.register(client, selectors.EVENT_READ, process)
                elif key.data in clients:  # its command was killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)


def _read(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what a command asks for, nothing if it was killed before it had said so, and its files."""
    size, files, _, _ = socket.recv_fds(client, 8, 3, socket.MSG_WAITALL)
    text = client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    return json.loads(text) if text and len(text) == int.from_bytes(size, "little") else {}, files


def _tell(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # the command was killed
        client.sendall(number.to_bytes(8, "little"))


def _answer(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tell the commands of processes that have ended."""
    for process in list(clients):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            client = clients.pop(process)
            if client in {key.fileobj for key in selector.get_map().values()}:
                selector.unregister(client)
                _tell(client, status)
            client.close()


def _begin(request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    """Make this fork the process that its command would have been."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if request["session"] == os.getsid(0):
        os.setpgid(0, request["group"])
    else:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    unbuffered = "-u" in request["arguments"][:1]
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(number, "wb" if number else "rb", closefd=False)
        text = io.TextIOWrapper(
            raw,
            errors="backslashreplace" if number == 2 else None,
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    return request


def run(arguments: list[str]) -> None:
    """Run a program as the interpreter does that gets these arguments."""
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    first = arguments[0]
    if first == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # it was imported, and now it is run
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(arguments[1], program.__dict__)
    else:
        assert not first.startswith("-"), f"{first} is an option that the server of processes does not know"
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(first))
        program.__dict__["__file__"] = first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
        exec(code, program.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who runs the tests presses Ctrl-C
    finish_imports()
    gc.freeze()  # else every process would copy and search all of these objects when it ends
    request = serve(sys.argv[1], int(sys.argv[2]))
    if request is not None:
        run(request["arguments"])
