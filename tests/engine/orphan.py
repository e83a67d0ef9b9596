"""A service that can be killed: starts a worker, hands over its end of the socket pair, sleeps. Tests only.

`orphan.py CONTROL_FD MODEL_FD [FOREIGN_FD]`: with FOREIGN_FD the worker gets that socket, not made by its parent.
"""

import socket
import subprocess
import sys
import time

control = socket.socket(fileno=int(sys.argv[1]))
model_fd = int(sys.argv[2])
ours, theirs = socket.socketpair()
if len(sys.argv) > 3:
    theirs = socket.socket(fileno=int(sys.argv[3]))
worker = subprocess.Popen(
    [sys.executable, "-P", "-m", "engine.worker", "--socket-fd", str(theirs.fileno())],
    pass_fds=[theirs.fileno(), model_fd],
)
theirs.close()
socket.send_fds(control, [str(worker.pid).encode()], [ours.fileno()])
if len(sys.argv) > 3:
    sys.exit(worker.wait())
time.sleep(600)
