"""The demo model against its reference: logits, greedy texts, perplexity."""

import json

import numpy as np
import pytest

from engine.eval import window_losses
from tests.golden.cases import golden_dir
from tests.golden.demo_model import demo_model
from tests.golden.running import greedy, load, logits, wrong_greedy

TOLERANCE = 1e-3
"""Logits have a deviation of 6 to 8; llama.cpp on float32 copies of the weights is within 6e-5 of the reference."""
WINDOW = 512


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    with np.load(golden_dir() / "smollm2" / "data.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    manifest = json.loads((golden_dir() / "smollm2" / "manifest.json").read_text())
    return [prompt["name"] for prompt in manifest["prompts"] if prompt["greedy_same_for_first"] is not None]


@pytest.fixture(scope="module")
def pipeline():
    return load(demo_model(), "f32", 64)


def test_best_logits(pipeline, data, prompts):
    for name in prompts:
        ours = logits(pipeline, data[f"{name}.ids"].tolist(), 256)[data[f"{name}.pos"]]
        theirs, best = data[f"{name}.ref_top_logits"], data[f"{name}.ref_top_ids"]
        assert np.abs(np.take_along_axis(ours, best, 1) - theirs).max() <= TOLERANCE, name
        assert (ours.argmax(1) == best[:, 0]).all(), name


def test_greedy_texts(pipeline, data, prompts):
    """All of them in one batch: neighbours change nothing."""
    together = greedy(pipeline, [data[f"{name}.ids"].tolist() for name in prompts], 48)
    for name, tokens in zip(prompts, together, strict=True):
        wrong = wrong_greedy(tokens, data[f"{name}.greedy_ref"], data[f"{name}.greedy_ref_gap"], TOLERANCE)
        assert wrong is None, f"{name}: token {wrong}"
    short = prompts[0]
    assert greedy(pipeline, [data[f"{short}.ids"].tolist()], 48) == together[:1]


def losses(pipeline, data: dict[str, np.ndarray], windows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(ours, the reference's), each [windows, 511]."""
    ids = data["ppl_a.ids"].reshape(-1, WINDOW)
    return np.stack([window_losses(pipeline, ids[window].tolist()) for window in windows]), data["ppl_a.nll_ref"][
        windows
    ]


def test_losses(pipeline, data):
    ours, theirs = losses(pipeline, data, [0])
    assert np.abs(ours - theirs).max() <= TOLERANCE


def test_int8_kv_by_perplexity(data):
    """Quantised keys and values cost less than 1 % of perplexity."""
    ours, theirs = losses(load(demo_model(), "int8", 8), data, [0, 3])
    assert abs(np.exp(ours.mean() - theirs.mean()) - 1) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "within"), [("f32", 1e-5), ("f16", 1e-3), ("int8", 0.01)])
def test_perplexity(data, kv_dtype, within):
    ours, theirs = losses(load(demo_model(), kv_dtype, 8), data, [0, 1, 2, 3])
    for part in (slice(None), slice(-256, None)):
        assert abs(np.exp(ours[:, part].mean() - theirs[:, part].mean()) - 1) < within
