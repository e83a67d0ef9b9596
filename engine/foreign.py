"""`python -m engine.foreign CARDS DEVICE BYTES SERVICE`: another process on a simulated card, for the fault `foreign`.

It takes what is free, the rest as it gets free, and ends when the process SERVICE does.
"""

import sys
import time
from pathlib import Path

from engine.memory.simulated_gpus import SimulatedGpus, started

OWNER = "foreign"
POLL_S = 0.05


def main(arguments: list[str]) -> int:
    path, (device, size, service) = Path(arguments[0]), map(int, arguments[1:])
    gpus, since = SimulatedGpus.open(path), started(service)
    held = 0
    while since is not None and started(service) == since:
        if held < size:
            held = gpus.take(device, OWNER, size)
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
