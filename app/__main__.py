"""The command line. Each command imports what it needs only when it runs, so that starting is quick.

Exit codes: 0 done, also after Ctrl-C and SIGTERM; 1 our own failure; 2 bad input, or it does not fit: one line on
stderr that names the thing and the mend.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from app.settings import SETTINGS, SettingInfo, flag, load_settings, variable
from engine.errors import ConfigError, DoesNotFit, EngineError, LoadRefused, ModelFileError

BAD_INPUT = 2
INTERNAL = 1
INPUT_ERRORS = (ConfigError, DoesNotFit, ModelFileError)
INPUT_KINDS = {kind.__name__ for kind in INPUT_ERRORS}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. Flags cannot be shortened: a new one must not change what an old call means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import importlib.metadata  # slow, and nothing else needs it at the start

        sys.stdout.write(f"ullage {importlib.metadata.version('ullage')}\n")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """The `ullage` command; returns its exit code."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.run(arguments, began))
    except KeyboardInterrupt:
        return 0
    except EngineError as error:
        sys.stderr.write(f"ullage: {error}\n")
        is_input = isinstance(error, INPUT_ERRORS) or (isinstance(error, LoadRefused) and error.kind in INPUT_KINDS)
        return BAD_INPUT if is_input else INTERNAL


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    """Until a command handles SIGTERM itself, it ends as Ctrl-C does."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ullage", description="Serves GGUF models behind the OpenAI API.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _serve_command(commands.add_parser("serve", help="serve a model over HTTP"))
    evaluate = commands.add_parser("eval", help="figures by which a model and this engine can be judged")
    kinds = evaluate.add_subparsers(title="figures", required=True, metavar="FIGURE")
    _logits_command(kinds.add_parser("logits", help="logits of given tokens, as an .npz file"))
    _perplexity_command(kinds.add_parser("perplexity", help="perplexity over a text, as one JSON line"))
    bench = commands.add_parser("bench", help="measure the speed of this installation")
    bench.add_argument("names", nargs="*", help="benchmarks to run; all without one")
    bench.set_defaults(run=_bench)
    warm = commands.add_parser("warm", help="compile the CPU kernels into the cache folder")
    _setting(warm, SETTINGS["cache_dir"])
    warm.set_defaults(run=_warm)
    return parser


def _serve_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="TOML", help="file of settings; flags and ULLAGE_* go before it")
    parser.add_argument("--check", action="store_true", help="start, say whether it would serve, and exit")
    for info in SETTINGS.values():
        _setting(parser, info)
    parser.set_defaults(run=_serve)


def _logits_command(parser: argparse.ArgumentParser) -> None:
    _evaluation(parser)
    parser.add_argument("--tokens", required=True, metavar="JSON", help="file with one list of token ids")
    parser.add_argument("--out", required=True, metavar="NPZ", help="file to write: `logits` [tokens, vocabulary]")
    parser.set_defaults(run=_logits)


def _perplexity_command(parser: argparse.ArgumentParser) -> None:
    _evaluation(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--ctx", type=int, default=512, metavar="N", help="tokens in a window (512)")
    parser.set_defaults(run=_perplexity)


def _evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="GGUF")
    for name in ("device", "kv_dtype", "threads", "cache_dir"):
        _setting(parser, SETTINGS[name])


def _setting(parser: argparse.ArgumentParser, info: SettingInfo) -> None:
    """One flag of a setting. Its value stays text: settings are converted in one place, whatever they come from."""
    text = f"{info.description} [{variable(info.name)}]"
    if info.kind is bool:
        parser.add_argument(flag(info.name), action="store_true", default=argparse.SUPPRESS, help=text)
        return
    words = get_args(info.kind) if get_origin(info.kind) is Literal else ()
    metavar = "|".join(words) or info.name.rpartition("_")[2].upper()
    parser.add_argument(flag(info.name), default=argparse.SUPPRESS, metavar=metavar, help=text)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in SETTINGS}


def _serve(arguments: argparse.Namespace, began: float) -> int:
    settings = load_settings(_given(arguments), config=arguments.config)
    from app.serve import serve  # only now: the other commands need no server

    serve(settings, began, check=arguments.check)
    return 0


def _logits(arguments: argparse.Namespace, began: float) -> int:
    from app.commands import evaluate_logits

    return evaluate_logits(load_settings(_given(arguments)), arguments.tokens, arguments.out)


def _perplexity(arguments: argparse.Namespace, began: float) -> int:
    from app.commands import evaluate_perplexity

    return evaluate_perplexity(load_settings(_given(arguments)), arguments.text, arguments.ctx)


def _bench(arguments: argparse.Namespace, began: float) -> int:
    from app.commands import bench

    return bench(arguments.names)


def _warm(arguments: argparse.Namespace, began: float) -> int:
    from app.commands import warm

    return warm(load_settings(_given(arguments)))


if __name__ == "__main__":
    sys.exit(main())
