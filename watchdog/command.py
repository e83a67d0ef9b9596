"""Flags of the watchdog without a service: `ullage watch`, or `python -m watchdog`. Light, for quick starts."""

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

BAD_INPUT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, metavar="N", help="an engine's process; its children count with it")
    parser.add_argument("--simulated", type=Path, metavar="FILE", help="watch the simulated cards of this file")
    parser.add_argument("--json", action="store_true", help="one JSON line, once; with --every one each time")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="how often to print (2)")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="answer Prometheus there while watching")
    parser.add_argument(
        "--reserve-mib", type=int, default=512, metavar="N", help="room that should stay; floors follow from it (512)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Watch until Ctrl-C; the exit code."""
    from watchdog.source import SourceError  # only now: --help needs no statistics
    from watchdog.standalone import Options, watch

    try:
        options = Options(
            arguments.pid,
            arguments.simulated,
            arguments.json,
            arguments.every,
            arguments.metrics,
            arguments.reserve_mib,
        )
        return watch(options, sys.stdout)
    except (SourceError, ValueError, OSError) as error:
        sys.stderr.write(f"ullage watch: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        return 0


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    parser = argparse.ArgumentParser(prog="watchdog", description="Watches the memory of this machine's devices.")
    add_arguments(parser)
    return run(parser.parse_args())


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
