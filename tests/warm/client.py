# A command of tests/warm: it has the server run a program, and ends as the program ends. It imports little.

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

folder, name = os.path.split(os.path.realpath(sys.argv[0]))
before = {"python": [], "tierstore": ["-m", "tierstore.cli"], "torchrun": ["-m", "torch.distributed.run"]}
request = {
    "arguments": before[name] + sys.argv[1:],
    "environment": {**os.environ, "PYTHON_EXEC": os.path.join(folder, "python")},  # of torchrun's ranks
    "folder": os.getcwd(),
    "session": os.getsid(0),
    "group": os.getpgrp(),
}
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(folder, "socket"))
text = json.dumps(request).encode()
socket.send_fds(server, [len(text).to_bytes(8, "little")], [0, 1, 2])
server.sendall(text)
process = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "little")
for number in PASSED_ON:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
answer = server.recv(8, socket.MSG_WAITALL)
if len(answer) != 8:
    sys.exit("the server of processes has ended")
code = os.waitstatus_to_exitcode(int.from_bytes(answer, "little"))
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
