"""Golden prompts through the engine's own pipeline, as the loop would run them."""

from collections.abc import Sequence

import numpy as np

from engine.config import BLOCK_TOKENS, EngineConfig
from engine.gguf import open_gguf
from engine.messages import Sampling, Submit
from engine.model.config import ModelConfig
from engine.ops.cpu.load import load_cpu
from engine.ops.cpu.pipeline import CpuPipeline
from engine.sequence import DecodeRow, PrefillChunk, StepPlan

GREEDY = Sampling(temperature=0)


def load(path: str, kv_dtype: str, blocks: int, max_batch: int = 8) -> CpuPipeline:
    gguf = open_gguf(path)
    config = EngineConfig(model_path=path, kv_dtype=kv_dtype, max_batch=max_batch)
    return load_cpu(gguf, ModelConfig.from_gguf(gguf), config, blocks, lambda phase, done, total: None)


def logits(pipeline: CpuPipeline, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """[tokens, vocab]."""
    return np.concatenate(list(pipeline.all_logits(tokens, chunk)))


def greedy(pipeline: CpuPipeline, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` tokens after each prompt: one prefill after the other, then all sequences decode together.

    The next step is launched before the last one is collected, as the step contract has it.
    """
    blocks, first = [], 0
    for prompt in prompts:
        needed = -(-(len(prompt) + count) // BLOCK_TOKENS)
        blocks.append(list(range(first, first + needed)))
        first += needed
    results: list[list[int]] = [[] for _ in prompts]

    def collect() -> None:
        result = pipeline.collect()
        assert not result.failed
        for sampled in result.sampled:
            results[sampled.slot].append(sampled.token)

    for slot, prompt in enumerate(prompts):
        pipeline.admit(slot, Submit(slot, prompt, [], GREEDY, count, ()), [])
        chunk = PrefillChunk(slot, prompt, 0, blocks[slot], completes=True, generated_index=0)
        pipeline.launch(StepPlan(slot, [], chunk))
        collect()
    for index in range(1, count):
        rows = [DecodeRow(slot, len(prompt) + index - 1, blocks[slot], index) for slot, prompt in enumerate(prompts)]
        pipeline.launch(StepPlan(index, rows, None))
        if pipeline.in_flight == 2:
            collect()
    if pipeline.in_flight:
        collect()
    return results


def wrong_greedy(ours: list[int], reference: np.ndarray, gaps: np.ndarray, tolerance: float) -> int | None:
    """Place of the first token that differs although the reference was sure of it; None when there is none.

    After a difference at a near tie the two texts are no longer comparable.
    """
    for place, (mine, theirs, gap) in enumerate(zip(ours, reference.tolist(), gaps, strict=True)):
        if mine != theirs:
            return place if gap > 2 * tolerance else None
    return None
