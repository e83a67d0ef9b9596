"""`python -m benchmarks [NAME …]`: run the named benchmarks, all without a name.

Each prints a table for people and ends with one JSON line for scripts.
"""

import importlib
import sys

import msgspec

from benchmarks.machine import machine

NAMES = ("kernels", "loop", "engine", "serving", "watchdog", "reload")


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        sys.stderr.write(f"ullage bench: {', '.join(unknown)}: there are {', '.join(NAMES)}\n")
        return 2
    sys.stdout.write(f"{machine()}\n")
    for name in names or NAMES:
        sys.stdout.write(f"\n{name}\n")
        result = importlib.import_module(f"benchmarks.{name}").run()
        sys.stdout.write(msgspec.json.encode({"benchmark": name, "machine": machine(), **result}).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
