import json
import subprocess
import sys

import numpy as np
import pytest

from engine import eval as evaluation
from tests.golden.cases import golden_cases

CASE = next(case for case in golden_cases() if case.name == "qwen3-Q8_0-s5")


@pytest.fixture
def tokens(tmp_path):
    with np.load(CASE.logits) as golden:
        path = tmp_path / "ids.json"
        path.write_text(json.dumps(golden["ids_c"].tolist()))
        return path


def run(*arguments: object) -> int:
    return evaluation.main([str(argument) for argument in arguments])


def test_logits(tokens, tmp_path):
    out = tmp_path / "logits.npz"
    assert run("logits", "--model", CASE.model, "--tokens", tokens, "--out", out, "--device", "cpu") == 0
    with np.load(out) as written, np.load(CASE.logits) as golden:
        assert written["logits"].dtype == np.float32
        assert written["logits"].shape == (150, 640)
        assert np.abs(written["logits"][golden["pos_c"]] - golden["ref_c"]).max() < 1e-3


def test_perplexity_by_hand(tokens, tmp_path, capsys):
    """Windows of 40 of 150 tokens: three, each from position 0; the last 30 tokens are left out."""
    assert run("perplexity", "--model", CASE.model, "--tokens", tokens, "--ctx", 40) == 0
    result = json.loads(capsys.readouterr().out)
    ids, losses = json.loads(tokens.read_text()), []
    for start in (0, 40, 80):
        part, out = tmp_path / f"{start}.json", tmp_path / f"{start}.npz"
        part.write_text(json.dumps(ids[start : start + 40]))
        run("logits", "--model", CASE.model, "--tokens", part, "--out", out)
        with np.load(out) as written:
            z = written["logits"].astype(np.float64)
        z -= np.log(np.exp(z).sum(-1, keepdims=True))
        losses.append([-z[place, token] for place, token in enumerate(ids[start + 1 : start + 40])])
    assert result == {
        "ppl_all": pytest.approx(np.exp(np.mean(losses))),
        "ppl_second_half": pytest.approx(np.exp(np.mean(np.array(losses)[:, -20:]))),
        "windows": 3,
        "tokens": 120,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2, 640]", "id 640 at place 2 is outside the vocabulary of 640"),
        ("[-1]", "id -1 at place 0 is outside"),
        ("[]", "the list is empty"),
        ("[1.5]", "not a JSON list of token ids"),
        ('{"a": 1}', "not a JSON list of token ids"),
        ("[1, 2", "not a JSON list of token ids"),
        (json.dumps([0] * 1025), "1025"),
    ],
)
def test_bad_tokens_are_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "ids.json"
    path.write_text(content)
    assert run("logits", "--model", CASE.model, "--tokens", path, "--out", tmp_path / "x.npz") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_other_bad_input_is_one_line(tokens, tmp_path, capsys):
    good = ["--model", CASE.model, "--tokens", tokens]
    for arguments, message in [
        (["logits", *good, "--out", tmp_path / "no" / "x.npz"], "No such file"),
        (["logits", *good, "--out", tmp_path / "x.npz", "--device", "cuda"], "--device cuda"),
        (["logits", "--model", CASE.model, "--tokens", tmp_path / "none", "--out", "x"], "No such file"),
        (["logits", "--model", tmp_path / "none.gguf", "--tokens", tokens, "--out", "x"], "none.gguf"),
        (["logits", "--model", tokens, "--tokens", tokens, "--out", "x"], "ids.json"),
        (["perplexity", *good, "--ctx", 512], "150 tokens do not fill one window of --ctx 512"),
        (["perplexity", *good, "--ctx", 1], "--ctx 1"),
        (["perplexity", *good, "--ctx", 100, "--threads", 1000], "threads: 1000"),
    ]:
        assert run(*arguments) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_as_a_child(tokens):
    options = ["--ctx", "100", "--kv-dtype", "int8", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.eval", "perplexity", "--model", CASE.model, "--tokens", tokens, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads(done.stdout)) == {"ppl_all", "ppl_second_half", "windows", "tokens"}
