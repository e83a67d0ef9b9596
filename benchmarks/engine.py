"""The engine's loop around the CPU pipeline and the demo model: prefill, decode by batch, a prompt with a known prefix.

No socket and no service. Prompts are random tokens; the best of several runs counts, for others may use the machine.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.gguf import open_gguf
from engine.kv_cache.blocks import BlockPool
from engine.loop import EngineLoop
from engine.messages import Sampling, Step, Submit, ToEngine, ToService
from engine.model.config import ModelConfig
from engine.ops.cpu.load import load_cpu
from engine.ops.cpu.pipeline import CpuPipeline
from engine.scheduler import Scheduler

DEMO_MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCKS, CONTEXT = 512, 2048
PREFILL_TOKENS, DECODE_PROMPT, DECODE_TOKENS = 512, 128, 48
SHARED_TOKENS, SHARED_PROMPT = 400, 500
RUNS = 3
LIMITS = {"decode 1": 20.0, "decode 8 over 1": 2.5, "prefill": 250.0, "shared over cold": 0.5}
"""Must-reach: tokens/s at batch 1, ratio of 8 streams to one, tokens/s of a prefill; and the greatest share that the
first token of a prompt with a known prefix may take of a cold one's time."""


class Session:
    """Inbox and outbox of one loop, in this thread."""

    def __init__(self, pipeline: CpuPipeline, vocab: int) -> None:
        self.vocab = vocab
        self.loop = EngineLoop(pipeline, Scheduler(BlockPool(BLOCKS), 64, CONTEXT), self, self)
        self._messages: list[ToEngine] = []
        self._tokens: dict[int, int] = {}

    def poll(self, timeout: float | None) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: ToService) -> None:
        if isinstance(message, Step):
            for token in message.tokens:
                self._tokens[token.sequence] = self._tokens.get(token.sequence, 0) + 1

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Seconds until every prompt has its first token, and from then until each has `tokens`."""
        self._tokens.clear()
        self._messages = [
            Submit(number, prompt, [], Sampling(temperature=0), tokens, ()) for number, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        while len(self._tokens) < len(prompts):
            self.loop.step()
        first = time.perf_counter()
        while min(self._tokens.values()) < tokens:
            self.loop.step()
        return first - began, time.perf_counter() - first


def demo_model() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ullage"
    return Path(os.environ.get("ULLAGE_DEMO_MODEL") or cache / DEMO_MODEL)


def run() -> dict[str, Any]:
    path = demo_model()
    if not path.is_file():
        sys.stdout.write(f"the demo model is not at {path}: `make serve` fetches it\n")
        return {"skipped": "no demo model"}
    gguf = open_gguf(str(path))
    model = ModelConfig.from_gguf(gguf)
    config = EngineConfig(model_path=str(path))
    began = time.perf_counter()
    pipeline = load_cpu(gguf, model, config, BLOCKS, lambda phase, done, total: None)
    loaded = time.perf_counter() - began
    figures = {"load seconds": loaded, **measure(pipeline, model.vocab)}
    sys.stdout.write(f"{model.name}, {model.quantisation}, f32 KV, {pipeline.ops.threads} threads\n")
    for name, figure in figures.items():
        limit = f"   (must reach {LIMITS[name]:g})" if name in LIMITS else ""
        sys.stdout.write(f"{name:>20}  {figure:8.2f}{limit}\n")
    return {"model": path.name, "figures": {name: round(figure, 3) for name, figure in figures.items()}}


def measure(pipeline: CpuPipeline, vocab: int) -> dict[str, float]:
    """Tokens a second, unless the name says otherwise."""
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[int(token) for token in row] for row in rng.integers(3, vocab, (count, length))]

    figures = {}
    for batch in (1, 8, 32):
        # The first tokens of the first sequences come while the last ones are prefilled: a few tokens more are decoded.
        timings = [
            Session(pipeline, vocab).generate(prompts(batch, DECODE_PROMPT), DECODE_TOKENS + batch)[1]
            for _ in range(RUNS)
        ]
        figures[f"decode {batch}"] = batch * (DECODE_TOKENS + (batch - 1) / 2) / min(timings)
    figures["decode 8 over 1"] = figures["decode 8"] / figures["decode 1"]
    prefill = min(Session(pipeline, vocab).generate(prompts(1, PREFILL_TOKENS), 1)[0] for _ in range(RUNS))
    figures["prefill"] = PREFILL_TOKENS / prefill
    cold, shared = [], []
    for _ in range(RUNS):
        session, (prompt,) = Session(pipeline, vocab), prompts(1, SHARED_PROMPT)
        cold.append(session.generate([prompt], 1)[0])
        tail = prompts(1, SHARED_PROMPT - SHARED_TOKENS)[0]
        shared.append(session.generate([prompt[:SHARED_TOKENS] + tail], 1)[0])
    figures["cold first token, s"] = min(cold)
    figures["shared over cold"] = min(shared) / min(cold)
    return figures
