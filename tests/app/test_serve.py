"""The whole thing as its users start it: two processes, a tiny model, signals, and what goes wrong at the start."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.banner import curl_line
from app.demo_model import SMOLLM2
from app.settings import load_settings
from tests.app.process import ROOT, TINY, Served, environment, serving, ullage
from tests.app.raw_client import events

LONG: Any = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Started in a folder where `engine` and `app` are something else."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("engine", "app"):
        (elsewhere / name).mkdir()
        (elsewhere / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    state = tmp_path_factory.mktemp("state")
    with serving("--model", str(TINY), "--max-batch", "32", state=state, cwd=elsewhere) as served:
        yield served


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.v1, api_key="unused", max_retries=0)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def metric(served: Served, name: str) -> float:
    text = httpx.get(served.metrics).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def test_the_banner_says_what_runs_and_where(tiny: Served) -> None:
    assert tiny.model == "model"
    for word in ("(llama, Q4_1", str(TINY), "cpu", "context 1,024 tokens, 32 sequences", "/admin.key"):
        assert word in tiny.banner
    assert curl_line(tiny.v1.removesuffix("/v1"), "model") in tiny.banner


def test_a_real_answer_twice_the_same(tiny: Served) -> None:
    client = client_of(tiny)
    messages: Any = [{"role": "user", "content": "Once upon a time"}]
    first = client.chat.completions.create(model="model", messages=messages, temperature=0, max_tokens=40)
    chunks = client.chat.completions.create(model="model", messages=messages, temperature=0, max_tokens=40, stream=True)
    assert first.choices[0].message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert first.usage is not None
    assert 1 <= first.usage.completion_tokens <= 40


def test_the_prefix_cache_shows_in_the_usage(tiny: Served) -> None:
    prompt = [7 + position % 500 for position in range(200)]
    client = client_of(tiny)
    cached = []
    for _ in range(2):
        answer = client.completions.create(model="model", prompt=prompt, max_tokens=2, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 200
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 192]


async def test_32_streams_at_once_equal_their_solo_texts(tiny: Served) -> None:
    async with openai.AsyncOpenAI(base_url=tiny.v1, api_key="unused") as client:

        async def text(seed: int) -> str:
            stream = await client.completions.create(
                model="model", prompt=f"Number {seed}:", seed=seed, max_tokens=24, stream=True, stop=["zq"]
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*(text(seed) for seed in range(32)))
        assert together == [await text(seed) for seed in range(32)]
        assert len(set(together)) > 16


def test_a_client_that_is_killed_gives_its_blocks_back(tiny: Served) -> None:
    before = metric(tiny, "ullage_request_success_total")
    body = {"model": "model", "prompt": "x", "stream": True, "max_tokens": 900, "ignore_eos": True}
    with httpx.stream("POST", tiny.v1 + "/completions", json=body) as answer:
        next(answer.iter_bytes())
    for _ in range(500):
        if metric(tiny, "ullage_num_requests_running") == 0 and metric(tiny, "ullage_kv_cache_usage_perc") == 0:
            break
        time.sleep(0.01)
    else:
        pytest.fail("its blocks are still in use")
    assert metric(tiny, "ullage_request_success_total") == before + 1


def test_the_engine_may_be_killed_under_a_stream(tiny: Served) -> None:
    client = client_of(tiny)
    plain = client.completions.create(model="model", prompt="Tell me", temperature=0, **LONG).choices[0].text
    [engine] = tiny.engine_pids()
    text = ""
    for chunk in client.completions.create(model="model", prompt="Tell me", temperature=0, stream=True, **LONG):
        if not text:
            os.kill(engine, signal.SIGKILL)
        text += chunk.choices[0].text
    assert text == plain
    assert tiny.engine_pids() != [engine]
    assert metric(tiny, "ullage_engine_restarts_total") == 1


def test_ctrl_c_ends_at_once_and_cleanly(tmp_path: Path) -> None:
    with serving("--model", str(TINY), state=tmp_path) as served:
        [engine] = served.engine_pids()
        body = {"model": "model", "prompt": "x", "stream": True, "max_tokens": 900, "ignore_eos": True}
        with httpx.stream("POST", served.v1 + "/completions", json=body) as answer:
            parts = answer.iter_bytes()
            received = next(parts)
            assert served.end(signal.SIGINT) == 0
            received += b"".join(parts)
        assert events(received)[-1]["error"]["code"] == "shut_down"
        assert not is_alive(engine)
        assert served.process.stdout is not None
        assert served.process.stdout.read() == ""


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_start_can_be_ended_while_it_loads(tmp_path: Path, with_signal: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "app", "serve", "--port", "0", "--ops-port", "0", "--model", str(TINY)]
    command += ["--state-dir", str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (engines := children.read_text().split()):
            time.sleep(0.01)
        process.send_signal(with_signal)
        assert process.communicate() == (b"", None)
    assert process.returncode == 0
    [engine] = map(int, engines)
    while is_alive(engine):
        time.sleep(0.01)


def test_sigterm_lets_running_answers_end(tmp_path: Path) -> None:
    with serving("--model", str(TINY), state=tmp_path) as served:
        body = {"model": "model", "prompt": "x", "stream": True, "max_tokens": 900, "ignore_eos": True}
        with httpx.stream("POST", served.v1 + "/completions", json=body) as answer:
            parts = answer.iter_bytes()
            received = next(parts)
            served.process.send_signal(signal.SIGTERM)
            late = httpx.post(served.v1 + "/completions", json={"model": "model", "prompt": "x"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            received += b"".join(parts)
        assert events(received)[-1] == "[DONE]"
        assert served.process.wait(30) == 0


def test_sigterm_has_a_deadline(tmp_path: Path) -> None:
    arguments = ("--model", str(TINY), "--drain-timeout", "0.1")
    with serving(*arguments, state=tmp_path) as served:
        body = {"model": "model", "prompt": "x", "stream": True, "n": 32, "max_tokens": 1000, "ignore_eos": True}
        with httpx.stream("POST", served.v1 + "/completions", json=body) as answer:
            parts = answer.iter_bytes()
            received = next(parts)
            assert served.end(signal.SIGTERM) == 0
            received += b"".join(parts)
        assert events(received)[-1]["error"]["code"] == "shut_down"


def test_the_admin_key_is_in_the_state_folder(tmp_path: Path) -> None:
    with serving("--model", str(TINY), state=tmp_path) as served:
        key = (tmp_path / "admin.key").read_text().strip()
        assert key not in served.banner
        admin = served.metrics.replace("/metrics", "/admin/vram")
        assert httpx.get(admin).status_code == 401
        assert httpx.get(admin, headers={"authorization": f"Bearer {key}"}).status_code == 404
        other = ullage("serve", "--model", str(TINY), "--port", "0", "--ops-port", "0", "--state-dir", str(tmp_path))
        assert (other.returncode, other.stderr.count("\n")) == (2, 1)
        assert "another ullage is running with it" in other.stderr


def refused(*arguments: str, state: Path) -> str:
    """The one line of a start that is refused with exit code 2."""
    done = ullage("serve", "--port", "0", "--ops-port", "0", "--state-dir", str(state), *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def broken(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    return str(path)


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    whole = TINY.read_bytes()
    state = tmp_path / "state"
    assert "/none.gguf" in refused("--model", "/none.gguf", state=state)
    assert "broken.gguf" in refused("--model", broken(tmp_path, b""), state=state)
    assert "broken.gguf" in refused("--model", broken(tmp_path, b"PK\x03\x04 a zip file"), state=state)
    assert "broken.gguf" in refused("--model", broken(tmp_path, whole[: len(whole) // 2]), state=state)
    foreign = whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1)
    line = refused("--model", broken(tmp_path, foreign), state=state)
    assert "general.architecture" in line
    assert "gemma" in line


def test_settings_that_cannot_be_honoured(tmp_path: Path) -> None:
    state = tmp_path / "state"
    line = refused("--model", str(TINY), "--max-context", "999999", state=state)
    assert "--max-context 999999" in line
    assert "1024" in line
    assert "--kv-pool-mib" in refused("--model", str(TINY), "--kv-pool-mib", "999999999", state=state)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in refused("--model", str(TINY), "--port", str(port), state=state)
    assert "--no-such-flag" in refused("--no-such-flag", state=state)
    assert "ULLAGE_NONSENSE" in ullage("serve", env={**os.environ, "ULLAGE_NONSENSE": "1"}).stderr


def test_check_starts_and_ends(tmp_path: Path) -> None:
    done = ullage(
        "serve", "--check", "--model", str(TINY), "--port", "0", "--ops-port", "0", "--state-dir", str(tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--model {TINY}\n" in done.stdout
    assert "--max-batch 64\n" in done.stdout


def readme_snippets() -> tuple[str, str]:
    """The curl line and the SDK program, as the README prints them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [curl] = re.findall(r"```\n(curl .*?)\n```", readme, re.DOTALL)
    [program] = re.findall(r"```python\n(from openai .*?)\n```", readme, re.DOTALL)
    return curl, program


def test_the_demo_model_answers_and_the_readme_works_as_printed(tmp_path: Path) -> None:
    cached = Path(load_settings({}).cache_dir) / "models" / Path(SMOLLM2.member).name
    if not cached.is_file():
        pytest.skip(f"the demo model is not in the cache ({cached}); `make serve` fetches it")
    with serving(state=tmp_path) as served:
        answer = client_of(served).chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        curl, program = (
            text.replace("http://127.0.0.1:8000", served.v1.removesuffix("/v1")) for text in readme_snippets()
        )
        # Only the length is ours: a poem of the model's own length takes long on a small machine.
        curl = curl.replace('"messages"', '"max_tokens": 8, "messages"')
        program = program.replace("stream=True", "stream=True, max_tokens=8")
        assert '"finish_reason":"length"' in run(["bash", "-c", curl])
        assert run([sys.executable, "-c", program]).strip()


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
