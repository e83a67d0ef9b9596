"""The whole service with the fake engine, as a process: `python -m benchmarks.scripted_service`.

Prints its address, serves until its standard input ends. The vocabulary is made up of pieces as long as real tokens.
"""

import asyncio
import random
import string
import sys
from typing import Any

import uvloop

from app.factory import create_service, running
from app.lifecycle import listening
from app.model import ServedModel
from app.prompts import Prompts
from app.settings import Settings
from app.sockets import Sockets, bind, url
from engine.fake import FakeEngine

MODEL = "scripted"
VOCABULARY = 32_000
SCRIPT_TOKENS = 4_096


class PieceTokenizer:
    """Word-like pieces of 1 to 8 letters, half of them with a leading space; one in fifty is not ASCII."""

    def __init__(self) -> None:
        draw = random.Random(7)
        letters = string.ascii_lowercase
        words = ["".join(draw.choices(letters, k=draw.randint(1, 8))) for _ in range(VOCABULARY - 1)]
        words = [word + "é" if draw.random() < 0.02 else word for word in words]
        self.token_bytes = [(" " * draw.randint(0, 1) + word).encode() for word in words] + [b""]
        self.text_bytes = self.token_bytes
        self.vocab_size = VOCABULARY
        self.stop_ids = (VOCABULARY - 1,)
        self.add_bos = False
        self.adds_space = False

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, limit: int | None = None) -> list[int]:
        return list(text.encode())


class LastMessage:
    def render(self, messages: list[dict[str, Any]]) -> str:
        return str(messages[-1]["content"])


async def serve() -> None:
    draw = random.Random(8)
    script = draw.choices(range(VOCABULARY - 1), k=SCRIPT_TOKENS)
    prompts = Prompts(PieceTokenizer(), LastMessage())  # type: ignore[arg-type]
    model = ServedModel(MODEL, "scripted", "none", "none", 1 << 17, prompts)
    service = create_service(
        Settings(),
        model,
        lambda generation, events: FakeEngine(script, generation, events, max_context=1 << 17),
        api_keys=[],
        admin_key="unused",
    )
    sockets = Sockets(bind("127.0.0.1", 0, "--port"), bind("127.0.0.1", 0, "--ops-port"))
    async with running(service) as start, listening(service, sockets):
        await start
        sys.stdout.write(url(sockets.public, "127.0.0.1") + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve())
