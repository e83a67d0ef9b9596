"""`python -m engine.eval logits|perplexity`: what the engine makes of given token ids, for any file it serves.

A child of `ullage eval`, which turns text into ids. Exit code 2, with one line, for anything wrong with the input.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_TOKENS, EngineConfig
from engine.errors import ConfigError, DoesNotFit, EngineError
from engine.gguf import open_gguf
from engine.memory.host import available_bytes
from engine.model.config import ModelConfig
from engine.model.size import kv_block_bytes, weights_bytes
from engine.ops.cpu.load import cpu_kv_dtype, load_cpu
from engine.ops.cpu.pipeline import SLICE_ROWS, CpuPipeline
from engine.plan import plan_cpu

Floats = npt.NDArray[np.float32]


class Perplexity(NamedTuple):
    """exp of the mean negative log likelihood: of all predicted tokens, and of those in the second half of a window,
    over `windows` windows with `tokens` tokens in all."""

    ppl_all: float
    ppl_second_half: float
    windows: int
    tokens: int


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def logits(options: argparse.Namespace) -> None:
    """Write array `logits` float32 [tokens, vocab] to the file --out."""
    tokens = read_tokens(options.tokens)
    pipeline, model = load(options, len(tokens))
    check_tokens(options.tokens, tokens, model.vocab)
    try:
        with Path(options.out).open("wb") as file:
            np.savez(file, logits=np.concatenate(list(pipeline.all_logits(tokens, SLICE_ROWS))))
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error.strerror}") from error
    except MemoryError as error:
        raise DoesNotFit(
            f"{options.tokens}: the logits of {len(tokens)} tokens take {4 * len(tokens) * model.vocab >> 20} MiB, "
            "more than there is: give fewer tokens"
        ) from error


def perplexity(options: argparse.Namespace) -> None:
    """Print one JSON line with the fields of Perplexity."""
    tokens = read_tokens(options.tokens)
    if options.ctx < 2:
        raise ConfigError(f"--ctx {options.ctx}: a window needs at least 2 tokens")
    if len(tokens) < options.ctx:
        raise ConfigError(f"{options.tokens}: {len(tokens)} tokens do not fill one window of --ctx {options.ctx}")
    pipeline, model = load(options, options.ctx)
    check_tokens(options.tokens, tokens, model.vocab)
    windows = [tokens[start : start + options.ctx] for start in range(0, len(tokens) - options.ctx + 1, options.ctx)]
    losses = np.stack([window_losses(pipeline, window) for window in windows])
    result = Perplexity(
        ppl_all=float(np.exp(losses.mean())),
        ppl_second_half=float(np.exp(losses[:, -(options.ctx // 2) :].mean())),
        windows=len(windows),
        tokens=len(windows) * options.ctx,
    )
    sys.stdout.write(msgspec.json.encode(result._asdict()).decode() + "\n")


def window_losses(pipeline: CpuPipeline, window: list[int]) -> npt.NDArray[np.float64]:
    """Negative log likelihood of each token but the first, given those before it: [len(window) - 1]."""
    losses, start = [], 1
    for rows in pipeline.all_logits(window, SLICE_ROWS):
        following = np.array(window[start : start + len(rows)])
        scores = rows[: len(following)].astype(np.float64)
        peak = scores.max(axis=1)
        mass = np.log(np.exp(scores - peak[:, None]).sum(axis=1)) + peak
        losses.append(mass - scores[np.arange(len(following)), following])
        start += len(rows)
    return np.concatenate(losses)


def load(options: argparse.Namespace, context: int) -> tuple[CpuPipeline, ModelConfig]:
    """The model with room for one sequence of `context` tokens."""
    if options.device == "cuda":
        raise ConfigError("--device cuda: this build runs on the cpu only")
    gguf = open_gguf(options.model)
    model = ModelConfig.from_gguf(gguf)
    dtype = cpu_kv_dtype(options.kv_dtype)
    config = EngineConfig(
        model_path=options.model, kv_dtype=dtype, max_context=context, max_batch=1, threads=options.threads
    )
    plan_cpu(
        config,
        model,
        weight_bytes=weights_bytes(gguf, model),
        block_bytes=kv_block_bytes(model, dtype),
        available_bytes=available_bytes(),
    )
    return load_cpu(gguf, model, config, -(-context // BLOCK_TOKENS), lambda phase, done, total: None), model


def read_tokens(path: str) -> list[int]:
    """A JSON list of token ids from a file. Raises ConfigError for anything else."""
    try:
        tokens = msgspec.json.decode(Path(path).read_bytes(), type=list[int])
    except OSError as error:
        raise ConfigError(f"--tokens {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--tokens {path}: not a JSON list of token ids: {error}") from error
    if not tokens:
        raise ConfigError(f"--tokens {path}: the list is empty")
    return tokens


def check_tokens(path: str, tokens: list[int], vocab: int) -> None:
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise ConfigError(f"--tokens {path}: id {token} at place {place} is outside the vocabulary of {vocab}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine.eval", description="Started by `ullage eval`.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", required=True)
    common.add_argument("--tokens", required=True, help="file with a JSON list of token ids")
    common.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    common.add_argument("--kv-dtype", choices=["auto", "f32", "f16", "int8"], default="auto")
    common.add_argument("--threads", type=int)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("logits", parents=[common])
    command.add_argument("--out", required=True, help="npz file to write")
    command.set_defaults(run=logits)
    command = commands.add_parser("perplexity", parents=[common])
    command.add_argument("--ctx", type=int, default=512)
    command.set_defaults(run=perplexity)
    return parser


if __name__ == "__main__":
    sys.exit(main())
