"""Every architecture and quantisation against the reference logits (README.md says how they are compared)."""

import json
import subprocess
import sys

import numpy as np
import pytest

from engine.ops.cpu.warm import warm
from tests.golden.cases import GoldenCase, golden_cases
from tests.golden.running import greedy, load, logits, wrong_greedy

CASES = golden_cases()
BLOCKS = 4


@pytest.fixture(scope="module", autouse=True)
def _warm_kernels():
    warm()


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="module")
def case(request) -> GoldenCase:
    return request.param


def check(case: GoldenCase, kv_dtype: str, tolerance: str) -> None:
    pipeline = load(str(case.model), kv_dtype, BLOCKS)
    limits = json.loads((case.path / "manifest.json").read_text())["tolerance"][tolerance]
    with np.load(case.logits) as golden:
        ours, theirs = [], []
        for prompt in "abc":
            rows = logits(pipeline, golden[f"ids_{prompt}"].tolist(), 256)
            ours.append(rows[golden[f"pos_{prompt}"]])
            theirs.append(golden[f"ref_{prompt}"])
        found = gaps(np.concatenate(ours), np.concatenate(theirs))
        assert all(found[name] <= limits[name] for name in found if name != "top1" and name in limits), found
        assert found["top1"] >= limits["top1"], found
        tokens = greedy(pipeline, [golden["ids_b"].tolist()], 24)[0]
        wrong = wrong_greedy(tokens, golden["greedy_b"], golden["greedy_gap_b"], limits["max_abs"])
        assert wrong is None, f"greedy token {wrong}: {tokens} for {golden['greedy_b'].tolist()}"


def gaps(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """The numbers that a tolerance set limits, of logits [rows, vocab]."""
    errors = np.abs(ours - theirs).max(-1)
    log_p, log_q = (z - np.logaddexp.reduce(z.astype(np.float64), -1, keepdims=True) for z in (theirs, ours))
    return {
        "max_abs": float(errors.max()),
        "position_max_abs_median": float(np.median(errors)),
        "position_max_abs_p90": float(np.quantile(errors, 0.9)),
        "mean_kl": float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        "top1": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }


def test_f32_kv_within_float32(case):
    check(case, "f32", "float32")


def test_f16_kv_within_float16(case):
    check(case, "f16", "float16")


def test_every_chunking_gives_the_same_bits(case):
    with np.load(case.logits) as golden:
        tokens = golden["ids_c"].tolist()
    for kv_dtype, chunks in (("f32", (1, 7, 64)), ("f16", (64,)), ("int8", (7,))):
        pipeline = load(str(case.model), kv_dtype, BLOCKS)
        whole = logits(pipeline, tokens, 256)
        for chunk in chunks:
            assert (logits(pipeline, tokens, chunk) == whole).all(), (kv_dtype, chunk)


def test_warm_reaches_every_kernel_that_a_model_needs():
    """A kernel compiled inside a request would stall it for seconds. Looked for in a child: other tests compile too."""
    command = [sys.executable, "-P", "-m", "tests.golden.compiled_beyond_warm", *(str(case.model) for case in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
