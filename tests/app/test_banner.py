"""The snippets work as printed, and the README has the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.banner import Banner, curl_line, python_snippet
from engine.messages import Ready
from tests.app.running import service

ROOT = Path(__file__).resolve().parents[2]
DEMO = ("http://127.0.0.1:8000", "SmolLM2-135M-Instruct.Q4_1")
READY = Ready("cpu", 8192, 64, "f32", 2048, 3 << 30, 150 << 20, 1.0)


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("with_keys", [False, True])
def test_both_snippets_work_as_printed(tmp_path: Path, with_keys: bool) -> None:
    key_file = tmp_path / "it's the keys"
    key_file.write_text("# ours\n\nsecret-key\n")
    with service(api_keys=["secret-key"] if with_keys else []) as running:
        snippets = (running.url, "bytes", str(key_file) if with_keys else None)
        assert '"content":"Hello there."' in run(["bash", "-c", curl_line(*snippets)])
        assert run([sys.executable, "-c", python_snippet(*snippets)]) == "Hello there."


def test_a_model_name_with_quotes(tmp_path: Path) -> None:
    assert curl_line("http://x", 'it\'s "one"').count("'\"'\"'") == 1
    compile(python_snippet("http://x", 'it\'s "one"'), "snippet", "exec")


def test_the_readme_has_the_snippets_of_the_demo_model() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```\n{curl_line(*DEMO)}\n```" in readme
    assert f"```python\n{python_snippet(*DEMO)}\n```" in readme


def test_it_fits_on_a_screen_and_has_no_key() -> None:
    banner = Banner(
        "1.2.3", DEMO[1], f"/models/{DEMO[1]}.gguf", "llama", "Q4_1", DEMO[0], "http://x:8001", None, "in /s/k"
    )
    text = banner.text(READY, 1.25)
    assert text.count("\n") <= 24
    assert "ready after 1.2 s" in text
    for word in (
        "1.2.3",
        DEMO[1],
        "cpu",
        "131,072 tokens",
        "context 8,192",
        "no API key",
        "http://x:8001/metrics",
        "in /s/k",
    ):
        assert word in text
    assert curl_line(*DEMO) in text
    assert python_snippet(*DEMO) in text
