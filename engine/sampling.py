"""From one row of logits to one token.

Order: logit bias, repetition penalty (prompt and output), presence and frequency penalty (output only), temperature,
top-k, top-p, min-p, Gumbel-max. The noise of a token is Philox4x32-10 of (seed; token id, generated index, choice), so
a draw is a function of the row, the parameters and its place in the output: batch neighbours, preemption and replay
change nothing. Log probabilities are those of the raw logits, before anything above touched them.

This is the oracle of every faster sampler. `philox_words` is its one slow part when the whole vocabulary survives; a
backend may hand `sample` a kernel that yields the same integers.
"""

from array import array
from collections.abc import Callable
from functools import lru_cache
from math import isfinite, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages import Sampling

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]
PhiloxWords = Callable[[Ids, int, int, int], NDArray[np.unsignedinteger[Any]]]

_LOW32 = 0xFFFF_FFFF
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

_NUCLEUS_HEAD = 1024
"""So many of the best tokens are summed up first; they are rarely not enough."""


class BadLogits(ArithmeticError):
    """The row's greatest logit is not a finite number: a fault of the model file or of a kernel."""


class Draw(NamedTuple):
    """One sampled token, with its log probability and the best (token, log probability) pairs where asked for."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class SamplerState:
    """What the sampler keeps of one sequence: its parameters and, if a penalty needs them, its token counts."""

    __slots__ = ("_bias", "_bias_ids", "_counts", "_ids", "_penalised", "_place", "sampling")

    def __init__(self, sampling: Sampling, prompt_ids: list[int], generated_ids: list[int]) -> None:
        self.sampling = sampling
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        penalties = (sampling.repetition_penalty - 1.0, sampling.presence_penalty, sampling.frequency_penalty)
        self._penalised = any(penalties)
        # Distinct tokens of prompt and output, how often each is in the output, and where each is in these two.
        self._ids = array("q", dict.fromkeys(prompt_ids) if self._penalised else ())
        self._counts = array("q", bytes(8 * len(self._ids)))
        self._place = {token: place for place, token in enumerate(self._ids)}
        for token in generated_ids:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Count one output token."""
        if not self._penalised:
            return
        place = self._place.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def adjust(self, logits: Floats) -> Floats:
        """Bias and penalties over a copy of `logits` [vocab]; `logits` itself where there are none."""
        if not (self._penalised or len(self._bias)):
            return logits
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        if len(self._ids):
            repetition = self.sampling.repetition_penalty
            ids, counts = np.array(self._ids), np.array(self._counts)
            seen = logits[ids]
            seen = np.where(seen > 0, seen / repetition, seen * repetition)
            seen -= self.sampling.presence_penalty * (counts > 0) + self.sampling.frequency_penalty * counts
            logits[ids] = seen
        return logits


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Counter words are uint64 arrays or scalars below 2**32, broadcast against each other; so are the four results.
    """
    c0, c1, c2, c3 = counter
    shift, low = np.uint64(32), np.uint64(_LOW32)
    for turn in range(_ROUNDS):
        k0, k1 = (np.uint64((word + turn * weyl) & _LOW32) for word, weyl in zip(key, _WEYL, strict=True))
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
    return c0, c1, c2, c3


def philox_words(ids: Ids, generated_index: int, choice: int, seed: int) -> NDArray[np.uint64]:
    """First word of the block with counter (id, generated_index, choice, 0) under the 64-bit `seed`, for each id."""
    counter = (ids.astype(np.uint64), np.uint64(generated_index), np.uint64(choice), np.uint64(0))
    words: NDArray[np.uint64] = philox(counter, (seed & _LOW32, seed >> 32 & _LOW32))[0]
    return words


def gumbel(words: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.float64]:
    """Standard Gumbel noise of 32-bit words: -log(-log(u)) with u = (word + 1/2) / 2**32."""
    uniform = (words + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def sample(logits: Floats, state: SamplerState, generated_index: int, words: PhiloxWords = philox_words) -> Draw:
    """Token number `generated_index` of a sequence, from its row of logits [vocab]. Raises BadLogits."""
    sampling = state.sampling
    adjusted = state.adjust(logits)
    if sampling.temperature == 0:
        token = int(adjusted.argmax())
        _check(float(adjusted[token]))
    else:
        token = _draw(adjusted, sampling, generated_index, words)
    if sampling.logprobs is None:
        return Draw(token)
    return _with_logprobs(logits, token, sampling.logprobs)


def _draw(logits: Floats, sampling: Sampling, generated_index: int, words: PhiloxWords) -> int:
    peak = float(logits.max())
    _check(peak)
    ids = _best(logits, sampling.top_k or len(logits))
    # Far below the peak, or at a tiny temperature, scores go to -inf and times to inf, as they should.
    with np.errstate(over="ignore"):
        scaled = logits[ids].astype(np.float64)
        scaled -= peak
        scaled /= sampling.temperature
        if sampling.top_p < 1:
            kept = _best(scaled, _nucleus(scaled, sampling.top_p))
            ids, scaled = ids[kept], scaled[kept]
        if sampling.min_p > 0:
            kept = np.flatnonzero(scaled >= log(sampling.min_p))
            ids, scaled = ids[kept], scaled[kept]
        return int(ids[_winner(scaled, words(ids, generated_index, sampling.choice, sampling.seed))])


def _winner(scaled: NDArray[np.float64], words: NDArray[np.unsignedinteger[Any]]) -> int:
    """Place of the greatest scaled + gumbel(words), which is the least time -log(u) * exp(-scaled).

    As -log(u) is at least 1 - u, whoever's bound comes after another's time is out: few places need their logarithm.
    """
    slowness = np.negative(scaled)
    np.exp(slowness, out=slowness)
    bounds = np.subtract(2.0**32 - 0.5, words)
    bounds *= slowness
    first = bounds.argmin()
    time = -log((float(words[first]) + 0.5) * 2.0**-32) * 2.0**32 * slowness[first]
    near = np.flatnonzero(bounds <= time * (1 + 1e-9))
    return int(near[(scaled[near] + gumbel(words[near])).argmax()])


def _check(peak: float) -> None:
    # NaN wins both max and argmax, so looking at the winner finds it anywhere in the row.
    if not isfinite(peak):
        raise BadLogits(f"the greatest logit is {peak}")


@lru_cache(maxsize=4)
def _all_places(count: int) -> Ids:
    places = np.arange(count)
    places.flags.writeable = False
    return places


def _best(values: Floats, count: int) -> Ids:
    """Places, ascending, of the `count` greatest values; among equal ones the first places are taken."""
    if count >= len(values):
        return _all_places(len(values))
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    level = np.flatnonzero(values == least)[: count - len(above)]
    return np.sort(np.concatenate((above, level)))


def _nucleus(scaled: NDArray[np.float64], top_p: float) -> int:
    """Least number of best tokens whose probabilities add up to `top_p`; at least 1."""
    wanted = top_p * np.exp(scaled).sum()
    # Sums run from the best token down, so a short head gives the same sums as the whole row, at a tenth of the time.
    for head in (_NUCLEUS_HEAD, len(scaled)):
        best = np.partition(scaled, -head)[-head:] if head < len(scaled) else scaled
        mass = np.cumsum(np.exp(np.sort(best)[::-1]))
        if mass[-1] >= wanted:
            break
    return int(np.searchsorted(mass, wanted)) + 1


def _with_logprobs(logits: Floats, token: int, count: int) -> Draw:
    peak = logits.max()
    total = float(peak) + log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    best = _best(logits, count) if count else np.arange(0)
    best = best[np.argsort(-logits[best], kind="stable")]
    top = [(int(place), float(logits[place]) - total) for place in best]
    return Draw(token, float(logits[token]) - total, top)
