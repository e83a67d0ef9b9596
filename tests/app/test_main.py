"""The command line: what it takes, what it says, with which exit code it ends."""

import importlib.metadata
import json
import re
from pathlib import Path

import numpy as np
import pytest

from app.__main__ import main
from app.settings import SETTINGS, flag
from tests.app.process import TINY, ullage

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def ended(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert isinstance(raised.value.code, int)
    return raised.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"ullage {importlib.metadata.version('ullage')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["serve", "--nonsense"],
        ["serve", "--por", "80"],
        ["serve", "stray"],
        ["serve", "--port"],
        ["eval"],
        ["eval", "logits", "--model", "m"],
        ["eval", "perplexity", "--model", "m", "--text", "t", "--ctx", "many"],
    ],
)
def test_what_it_does_not_know_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"ullage.*: .+\n", said.err)


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["serve", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for info in SETTINGS.values():
        assert flag(info.name) in shown
        assert info.description in shown


def test_a_bad_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "nonsense"]) == 2
    assert capsys.readouterr().err == "ullage: --port: expected a whole number\n"


def test_eval_logits(tmp_path: Path) -> None:
    tokens, out = tmp_path / "ids.json", tmp_path / "logits.npz"
    tokens.write_text(json.dumps([5, 6, 7, 8]))
    done = ullage("eval", "logits", "--model", str(TINY), "--tokens", str(tokens), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    logits = np.load(out)["logits"]
    assert (logits.shape, logits.dtype) == ((4, 640), np.float32)


def test_eval_perplexity(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    done = ullage("eval", "perplexity", "--model", str(TINY), "--text", str(text), "--ctx", "32", "--kv-dtype", "f16")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert set(figures) == {"ppl_all", "ppl_second_half", "windows", "tokens"}
    assert figures["tokens"] == 32 * figures["windows"] > 0
    assert figures["ppl_all"] > 1


def test_eval_refuses_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    perplexity = ["eval", "perplexity", "--model", str(TINY), "--text"]
    for arguments, message in (
        ([*perplexity, str(text)], r"--text .*: \d+ tokens do not fill one window of --ctx 512"),
        ([*perplexity, str(tmp_path / "none")], "--text .*none: No such file"),
        ([*perplexity, str(TINY)], r"--text .*model.gguf: is not UTF-8 \(byte \d+\)"),
        (["eval", "perplexity", "--model", "/none.gguf", "--text", str(text)], "/none.gguf"),
        (["eval", "logits", "--model", str(TINY), "--tokens", "/none", "--out", "/x"], "--tokens /none: No such file"),
        (["eval", "logits", "--model", "m", "--tokens", "t", "--out", "o", "--device", "cuda"], "--device cuda: "),
    ):
        assert main(arguments) == 2
        said = capfd.readouterr()
        assert re.search(message, said.err), said.err
        assert said.err.count("\n") == 1


def test_warm_and_bench(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["warm"]) == 0
    assert "kernels" in capfd.readouterr().out
    assert main(["bench", "nonsense"]) == 2
    assert "ullage bench: nonsense: there are " in capfd.readouterr().err
