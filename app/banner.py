"""What `ullage serve` prints once it is ready, within one screen; the README shows the same two snippets."""

import shlex
from dataclasses import dataclass

import msgspec

from engine.config import BLOCK_TOKENS
from engine.messages import Ready

MIB = 1 << 20

CURL = """\
curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {body}"""

BODY = """\
{{
  "model": {model},
  "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]
}}"""

PYTHON = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
messages = [{{"role": "user", "content": "Write a haiku about the sea."}}]
stream = client.chat.completions.create(model={model}, messages=messages, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _first_key(key_file: str) -> str:
    return f"next(k.strip() for k in open({key_file!r}) if k.strip() and k.lstrip()[0] != '#')"


def curl_line(url: str, model: str, key_file: str | None = None) -> str:
    """A request to paste into a shell."""
    key = ""
    if key_file is not None:
        key = f" -H \"Authorization: Bearer $(grep -v -m1 -e '^ *#' -e '^ *$' {shlex.quote(key_file)})\""
    return CURL.format(url=url, key=key, body=shlex.quote(BODY.format(model=_json(model))))


def python_snippet(url: str, model: str, key_file: str | None = None) -> str:
    """A program to paste into Python."""
    key = '"none"' if key_file is None else _first_key(key_file)
    return PYTHON.format(url=url, model=_json(model), key=key)


@dataclass(frozen=True)
class Banner:
    version: str
    model: str
    model_path: str
    architecture: str
    quantisation: str
    public_url: str
    ops_url: str
    api_key_file: str | None
    admin_key: str
    """Where it is, and on a terminal also what it is."""

    def text(self, ready: Ready, seconds: float) -> str:
        keys = f"keys from {self.api_key_file}" if self.api_key_file else "no API key"
        blocks = f"{ready.kv_blocks:,} blocks of {BLOCK_TOKENS}, {ready.kv_dtype}, {ready.kv_bytes / MIB:,.0f} MiB"
        return f"""\
Ullage {self.version} is ready after {seconds:.1f} s. Ctrl-C stops it.

  model      {self.model} ({self.architecture}, {self.quantisation}, {ready.weight_bytes / MIB:,.0f} MiB of weights)
             {self.model_path}
  device     {ready.device}
  room       {ready.kv_blocks * BLOCK_TOKENS:,} tokens of keys and values ({blocks})
             context {ready.max_context:,} tokens, {ready.max_batch} sequences at once
  public     {self.public_url}/v1  ({keys})
  ops        {self.ops_url}/metrics
  admin key  {self.admin_key}

{curl_line(self.public_url, self.model, self.api_key_file)}

{python_snippet(self.public_url, self.model, self.api_key_file)}
"""
