"""The whole engine but for the model and the socket: loop, scheduler, pool, scripted pipeline."""

from collections import defaultdict

from engine.kv_cache.blocks import BlockPool
from engine.loop import EngineLoop
from engine.messages import Cancel, Failed, Step
from engine.scheduler import Scheduler
from tests.engine.scripted import ScriptedPipeline


class Box:
    """Inbox and outbox in lists."""

    def __init__(self):
        self.incoming, self.outgoing = [], []

    def poll(self, timeout):
        if timeout is None and not self.incoming:
            raise AssertionError("the loop would sleep with nothing to wake it")
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, message):
        self.outgoing.append(message)


class Engine:
    """Feeds a loop and keeps what it says, by sequence."""

    def __init__(self, n_blocks=64, block_tokens=4, max_batch=4, max_context=1000, eager=False, pipeline=None, **rest):
        self.pool = BlockPool(n_blocks, block_tokens=block_tokens)
        self.pipeline = pipeline or ScriptedPipeline(block_tokens, eager)
        self.scheduler = Scheduler(self.pool, max_batch, max_context, **rest)
        self.box = Box()
        self.loop = EngineLoop(self.pipeline, self.scheduler, self.box, self.box)
        self.turns = 0
        self.tokens = defaultdict(list)
        self.ends = defaultdict(list)
        """What ended each sequence: a finish reason, "cancelled" or the code of a failure."""
        self.cached = defaultdict(list)
        self.released = []
        self.steps: list[Step] = []

    def submit(self, *submits):
        self.box.incoming.extend(submits)

    def cancel(self, *sequences):
        self.box.incoming.append(Cancel(list(sequences)))

    @property
    def busy(self):
        return bool(self.box.incoming) or not self.scheduler.idle

    def turn(self, times=1):
        for _ in range(times):
            self.turns += 1
            self.loop.step()
            self.audit()
            self.read()

    def run(self, most=5000):
        """Until idle. A hang is an AssertionError."""
        for _ in range(most):
            if not self.busy:
                return
            self.turn()
        raise AssertionError("still busy")

    def audit(self):
        self.pool.audit(sequence.blocks for sequence in self.scheduler.holding())

    def read(self):
        messages, self.box.outgoing = self.box.outgoing, []
        for message in messages:
            if isinstance(message, Failed):
                self.ends[message.sequence].append(message.code)
                continue
            self.steps.append(message)
            for sequence, cached in message.admitted:
                self.cached[sequence].append(cached)
            for token in message.tokens:
                assert not self.ends[token.sequence], "a token after the end"
                self.tokens[token.sequence].append(token.token)
                if token.finish is not None:
                    self.ends[token.sequence].append(token.finish)
            self.released.extend(message.released)
