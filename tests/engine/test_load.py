"""From a parsed file to a loop, in this process."""

import pytest

from engine.config import EngineConfig
from engine.load import load
from engine.messages import LoadProgress, Step, Stop
from tests.engine.cards import MODEL, parsed
from tests.engine.scripted import submit


class Wire:
    def __init__(self):
        self.incoming, self.sent = [], []

    def poll(self, timeout):
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize(("settings", "chunks"), [({}, [512, 188]), ({"prefill_chunk": 600}, [600, 100])])
def test_a_prompt_is_read_in_chunks_that_the_backend_finds_sensible(settings, chunks):
    """However large a chunk of an idle engine may be: a cancelled request waits for its step."""
    wire = Wire()
    config = EngineConfig(model_path=MODEL, threads=1, **settings)
    assert config.prefill_chunk_idle == 4096
    loop, ready = load(config, parsed(), wire, None, restore=False)
    assert (ready.devices, ready.layer_split, ready.dropped) == ([], [], [])
    assert {message.phase for message in wire.sent if isinstance(message, LoadProgress)} == {"weights", "kernels"}
    wire.incoming.append(submit(1, range(700 - 60), max_tokens=1))
    wire.incoming[0].prompt_ids.extend(range(60))
    while 1 not in [s for message in wire.sent if isinstance(message, Step) for s in message.released]:
        assert loop.step()
    read = [message.stats.prefill_tokens for message in wire.sent if isinstance(message, Step)]
    assert [tokens for tokens in read if tokens] == chunks
    wire.incoming.append(Stop())
    assert not loop.step()
