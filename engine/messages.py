"""The only thing that service and engine share while they run.

A frame on the socket pair is a little-endian u32 length and that many bytes of msgpack: `[generation, message]`.
Frames of another generation are dropped by the receiver; a frame cut off by the peer's death never parses and is
dropped with the connection. Both ends compare `BUILD_ID` and `SCHEMA` before anything else is said.
"""

import msgspec

from engine.config import EngineConfig

SCHEMA = 2
"""Raised with every change of a message's shape."""

MAX_FRAME_BYTES = 1 << 30
"""A longer frame means a broken peer."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence turns logits into tokens; `seed` and `choice` key its noise (Philox4x32-10)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    """None: no log probabilities; k in 0..20: the chosen token's and those of the k best."""


# service → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The handshake's first word. A successor imports, parses, and then waits for `Load` before it allocates."""

    build_id: str
    schema: int
    generation: int
    config: EngineConfig
    model_fd: int
    successor: bool = False
    """True: send `Prepared` and wait for `Load`; False: load at once."""
    carry_fd: int | None = None
    """The service's memfd for carried KV; written at a checkpoint, read by the successor. None: nothing is carried."""


class Load(msgspec.Struct, frozen=True, tag="load_now"):
    """To a prepared successor: the cards are free, plan with what there is, load, restore carried KV if `restore`."""

    config: EngineConfig
    restore: bool


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Drain the pipeline, run no further step, copy KV to the carry memfd (live sequences first, then the prefix
    cache, most recent first) up to `budget_bytes`, answer Checkpointed, then only wait for Stop."""

    budget_bytes: int


class Trim(msgspec.Struct, frozen=True, tag="trim"):
    """Carry out one rung between steps, pipeline drained. `device` None: on every device. `keep_bytes` is for
    `elastic`: how many bytes of elastic KV may stay on a device (None: none)."""

    request: int
    rung: str
    device: int | None = None
    keep_bytes: int | None = None


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """Take elastic memory again, up to `bytes` on each device named (None: up to the plan); answered by Trimmed."""

    request: int
    device: int | None = None
    bytes: int | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start, or resume, one sequence: generation goes on after `generated_ids`."""

    sequence: int
    prompt_ids: list[int]
    generated_ids: list[int]
    sampling: Sampling
    max_tokens: int
    """Limit on all generated tokens, those in `generated_ids` included."""
    stop_ids: tuple[int, ...]
    """A token of these ends the sequence with `stop`; it is reported and counted, its text is not shown."""
    cache_prompt: bool = True
    cache_scope: str = ""
    poison: bool = False
    """The fault `poison` is meant for this one's user."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    sequences: list[int]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Orderly end: the engine drains its pipeline and exits with code 0."""


# engine → service


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    build_id: str
    schema: int
    pid: int


class LoadProgress(msgspec.Struct, frozen=True, tag="load"):
    phase: str
    done: int
    total: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A successor has imported its libraries and parsed the file; it has made no context and allocated nothing big."""


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    blocks: int
    bytes: int
    seconds: float


class RungResult(msgspec.Struct, frozen=True, array_like=True):
    """What one rung did on one device. `claimed_bytes` is what the allocator believes; the watchdog measures."""

    rung: str
    device: int
    result: str
    """"ok", "noop" or "failed"."""
    claimed_bytes: int
    seconds: float
    message: str = ""


class Trimmed(msgspec.Struct, frozen=True, tag="trimmed"):
    request: int
    results: list[RungResult]


class Ledger(msgspec.Struct, frozen=True, tag="ledger"):
    """Bytes by owner on each device, whenever they have changed since the last one."""

    devices: list[dict[str, int]]


class DeviceReady(msgspec.Struct, frozen=True):
    """One device as the engine uses it. `uuid` names the physical card or MIG instance."""

    device: int
    uuid: str
    name: str
    stages: list[int]
    total: int
    reserve: int
    ledger: dict[str, int]
    elastic_bytes: int
    """Elastic KV now mapped above the minimum."""
    elastic_plan_bytes: int
    largest_late_bytes: int
    """Largest allocation that may still come after ready (a workspace re-created, an elastic group)."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine serves; what it chose where the config said None."""

    device: str
    max_context: int
    max_batch: int
    kv_dtype: str
    kv_blocks: int
    kv_bytes: int
    weight_bytes: int
    load_seconds: float
    devices: list[DeviceReady] = []
    """Empty on the plain CPU backend."""
    restored_blocks: int = 0
    layer_split: list[int] = []
    """Layers of each stage."""
    dropped: list[str] = []
    """Optional parts that the plan left out: "shadow", "graph buckets"."""
    skipped_blocks: int = 0
    """Carried blocks that were not used: another model, type or arithmetic, or a wrong checksum."""


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """`kind` is the class name of engine.errors; `message` is its one line. The engine exits with code 2 (or 1)."""

    kind: str
    message: str


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token of one sequence; `finish` is "stop", "length" or None while it goes on."""

    sequence: int
    token: int
    finish: str | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """Sizes after the step; those named `_total` only ever grow within one engine's life."""

    running: int
    waiting: int
    decode_rows: int
    prefill_tokens: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks: int
    preemptions_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    seconds: float


class Step(msgspec.Struct, frozen=True, tag="step"):
    """All that one step made known, for all sequences, in one message."""

    step: int
    tokens: list[Token]
    admitted: list[tuple[int, int]]
    """(sequence, tokens of its text found in the cache), once each time a sequence starts or resumes."""
    released: list[int]
    """Sequences that ended or were cancelled and whose blocks have returned."""
    stats: StepStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """One sequence cannot go on; the others are untouched. `code` is a metric label, `message` one line."""

    sequence: int
    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent every second by the engine's second thread, also while a step runs."""

    step: int
    busy: bool
    step_seconds: float
    """Age of the running step, 0 when none runs."""
    kind: str = "load"
    """What runs: "load", "decode", "prefill", "trim" or "checkpoint"."""
    longest_seconds: float = 0.0
    """The longest step of that kind that this engine has done."""


ToEngine = Hello | Load | Submit | Cancel | Stop | Checkpoint | Trim | Grow
ToService = (
    Welcome | Prepared | LoadProgress | Ready | LoadFailed | Step | Failed | Heartbeat | Trimmed | Checkpointed | Ledger
)
