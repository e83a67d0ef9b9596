"""A model for HTTP tests whose tokens are bytes, so that a script of tokens is a text."""

from collections.abc import Sequence
from typing import Any

from app.model import ServedModel
from app.prompts import Prompts
from app.text.template import TemplateError

EOS = 256
BOS = 257


class ByteTokenizer:
    """Ids 0 to 255 are the bytes; then end and beginning of text."""

    token_bytes: Sequence[bytes] = [bytes([byte]) for byte in range(256)] + [b"", b""]
    text_bytes = token_bytes
    vocab_size = 258
    stop_ids = (EOS,)
    add_bos = False
    adds_space = False

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, limit: int | None = None) -> list[int]:
        return [BOS] * add_bos + list(text.encode())


class PlainTemplate:
    """`role: content` lines; refuses what the tests ask it to refuse."""

    def render(self, messages: list[dict[str, Any]], **_: Any) -> str:
        if any(message["content"] == "refuse me" for message in messages):
            raise TemplateError("this model does not take such messages")
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def byte_model(name: str = "bytes", trained_context: int = 4096) -> ServedModel:
    prompts = Prompts(ByteTokenizer(), PlainTemplate())  # type: ignore[arg-type]
    return ServedModel(name, f"/models/{name}.gguf", "llama", "F32", trained_context, prompts)
