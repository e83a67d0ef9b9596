"""`ullage eval`, `bench` and `warm`: the work is a child's, so that this process never loads kernels or a device."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from app.settings import Settings, child_environment, engine_variables
from app.text.tokenizer import Tokenizer
from engine.errors import ConfigError
from engine.gguf import open_gguf

INTERNAL = 1


def evaluate_logits(settings: Settings, tokens: str, out: str) -> int:
    """Exit code of the child, which writes `out`."""
    return _evaluate(settings, ["logits", "--tokens", tokens, "--out", out])


def evaluate_perplexity(settings: Settings, text: str, ctx: int) -> int:
    """The text becomes tokens here, without BOS and with no token parsed out of it; the child prints the figures."""
    assert settings.model is not None
    try:
        content = Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {text}: is not UTF-8 (byte {error.start})") from error
    ids = Tokenizer.from_gguf(open_gguf(settings.model)).encode(content, parse_special=False)
    if len(ids) < ctx:
        raise ConfigError(f"--text {text}: {len(ids)} tokens do not fill one window of --ctx {ctx}")
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="ascii") as file:
        json.dump(ids, file)
        file.flush()
        return _evaluate(settings, ["perplexity", "--tokens", file.name, "--ctx", str(ctx)])


def warm(settings: Settings) -> int:
    """Compile every CPU kernel into the cache folder."""
    return _child(["engine.ops.cpu.warm"], settings)


def bench(names: Sequence[str]) -> int:
    found = importlib.util.find_spec("benchmarks")
    ours = Path(__file__).resolve().parent.parent / "benchmarks"
    if found is None or found.origin is None or Path(found.origin).resolve().parent != ours:
        raise ConfigError("bench: the benchmarks come with a source checkout; this is an installed copy")
    return _child(["benchmarks", *names], None)


def _evaluate(settings: Settings, arguments: list[str]) -> int:
    engine = settings.engine_config(settings.model or "")
    common = ["--model", engine.model_path, "--device", engine.device, "--kv-dtype", engine.kv_dtype]
    if engine.threads is not None:
        common += ["--threads", str(engine.threads)]
    return _child(["engine.eval", *arguments, *common], settings)


def _child(module: list[str], settings: Settings | None) -> int:
    """Run `python -P -m module…`: with -P a folder of the user's that is named like ours is never taken."""
    environment = child_environment(engine_variables(settings) if settings else {})
    code = subprocess.run([sys.executable, "-P", "-m", *module], env=environment, check=False).returncode
    return code if code >= 0 else INTERNAL
