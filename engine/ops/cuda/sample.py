"""Sampling on the device: the wrapper of sample.cu, and what it keeps of every sequence."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, Self

import numpy as np

from engine.messages import Sampling
from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address
from engine.plan.scratch import MOST_BIAS, MOST_TOP, SAMPLE_SLICE, SLOT_BYTES

_THREADS, _PICK_THREADS = 256, 1024
_SEEN, _MOST_COUNT = 0x8000, 0x7FFF
_NEVER = -1e30


class SlotStruct(ctypes.Structure):
    """`Slot` of sample.cu."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("log_min_p", ctypes.c_float),
        ("repetition", ctypes.c_float),
        ("presence", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("seed_low", ctypes.c_uint32),
        ("seed_high", ctypes.c_uint32),
        ("choice", ctypes.c_uint32),
        ("logprobs", ctypes.c_int32),
        ("bias_count", ctypes.c_int32),
        ("penalised", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 3),
    )


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of sample.cu."""

    _fields_ = (
        *((name, Pointer) for name in (
            "logits", "adjusted", "slots", "counts", "bias_tokens", "bias_values", "slices", "scores", "rows",
            "indices", "last_tokens", "tokens", "logprobs", "top_tokens", "top_logprobs",
        )),
        ("vocab", ctypes.c_int32),
        ("slice_count", ctypes.c_int32),
    )  # fmt: skip


assert ctypes.sizeof(SlotStruct) == SLOT_BYTES
UNIT = Unit.of("sample.cu", {"ARGS_BYTES": ctypes.sizeof(SampleArgs)})


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Results of as many rows as there are tokens, side by side in one array."""

    all: Array
    """int32: everything below, to be copied at once"""
    tokens: Array
    """int32 [rows]; -1: the row's greatest logit is not finite"""
    logprobs: Array
    top_tokens: Array
    """int32 [rows, MOST_TOP]"""
    top_logprobs: Array

    @classmethod
    def of(cls, memory: Array) -> Self:
        """In int32 memory of the host or of a device, 2 + 2 * MOST_TOP numbers a row."""
        rows = len(memory) // (2 + 2 * MOST_TOP)
        floats, top = memory.view("float32"), rows * MOST_TOP
        tops, top_floats = memory[2 * rows :], floats[2 * rows :]
        shape = rows, MOST_TOP
        return cls(
            memory, memory[:rows], floats[rows : 2 * rows], tops[:top].reshape(shape), top_floats[top:].reshape(shape)
        )


class Sampler:
    """Sampler state of sequences over a vocabulary, in the buffers of plan.scratch.sampler_buffers.

    `last_tokens` int32 [slots]: the token that a slot's next forward reads.
    """

    def __init__(self, kernels: Kernels, room: Mapping[str, Array], last_tokens: Array) -> None:
        loaded = kernels.load(UNIT)
        self._scan, self._noise, self._pick = (loaded[f"sample_{name}"] for name in ("scan", "noise", "pick"))
        self._adjusted, self._slice_bests, self._scores = room["adjusted"], room["slices"], room["scores"]
        self._slots, self._counts = room["slots"], room["counts"]
        self._bias_tokens, self._bias_values = room["bias_tokens"], room["bias_values"]
        self.last_tokens = last_tokens
        self.drawn = Drawn.of(room["drawn"])
        self._vocab = int(self._adjusted.shape[1])
        self._slices = -(-self._vocab // SAMPLE_SLICE)

    def admit(self, slot: int, sampling: Sampling, prompt_ids: list[int], generated: list[int], stream: Any) -> None:
        """Set a slot for a sequence that starts or resumes after `generated`. Between steps only; copies from the host.

        Raises ValueError when there are more than MOST_BIAS biases.
        """
        if len(sampling.logit_bias) > MOST_BIAS:
            raise ValueError(f"{len(sampling.logit_bias)} logit biases; the device sampler takes {MOST_BIAS}")
        penalised = bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)
        struct = SlotStruct(
            sampling.temperature, sampling.top_p, log(sampling.min_p) if sampling.min_p > 0 else _NEVER,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.top_k,
            sampling.seed & 0xFFFFFFFF, sampling.seed >> 32 & 0xFFFFFFFF, sampling.choice,
            -1 if sampling.logprobs is None else sampling.logprobs, len(sampling.logit_bias), penalised,
        )  # fmt: skip
        self._slots[slot].set(np.frombuffer(bytes(struct), np.uint8), stream)
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias, strict=True)
            self._bias_tokens[slot, : len(tokens)].set(np.array(tokens, np.int32), stream)
            self._bias_values[slot, : len(values)].set(np.array(values, np.float32), stream)
        if penalised:
            counts = np.zeros(self._vocab, np.uint16)
            np.add.at(counts, generated, 1)
            np.minimum(counts, _MOST_COUNT, out=counts)
            counts[generated] |= _SEEN
            counts[prompt_ids] |= _SEEN
            self._counts[slot].set(counts, stream)

    def __call__(self, logits: Array, rows: Array, indices: Array, stream: Any) -> None:
        """One token for each row of logits f32 [m, vocab] into `drawn` and `last_tokens`.

        rows int32 [m]: slot of each row, -1 for padding; indices int32 [m]: index of the token drawn. Raises
        ValueError.
        """
        m = int(logits.shape[0])
        state = (
            self._adjusted, self._slots, self._counts, self._bias_tokens, self._bias_values, self._slice_bests,
            self._scores,
        )  # fmt: skip
        drawn = self.drawn
        results = drawn.tokens, drawn.logprobs, drawn.top_tokens, drawn.top_logprobs
        args = SampleArgs(
            address(logits, "float32", (m, self._vocab), "logits"), *(Pointer(array.data.ptr) for array in state),
            address(rows, "int32", (m,), "rows"), address(indices, "int32", (m,), "indices"),
            Pointer(self.last_tokens.data.ptr), *(Pointer(array.data.ptr) for array in results),
            self._vocab, self._slices,
        )  # fmt: skip
        if m > len(self._adjusted):
            raise ValueError(f"{m} rows; there is room for {len(self._adjusted)}")
        self._scan.launch((self._slices, m, 1), _THREADS, args, stream)
        self._noise.launch((self._slices, m, 1), _THREADS, args, stream)
        self._pick.launch((1, m, 1), _PICK_THREADS, args, stream)
