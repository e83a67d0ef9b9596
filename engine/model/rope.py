"""The rotary embedding's frequencies from its settings (model/config.py)."""

import math

import numpy as np
import numpy.typing as npt

from engine.model.rope_config import FREQUENCY_FACTORS, RopeConfig
from engine.ops.backend import Rope, Weights


def rope(config: RopeConfig, weights: Weights) -> Rope:
    """Frequencies float64 [dims / 2] in radians a position."""
    frequencies = config.theta ** (-np.arange(0, config.dims, 2) / config.dims)
    if config.frequency_factors:
        frequencies = frequencies / weights.numbers(FREQUENCY_FACTORS)
    magnitude = config.attention_factor
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "yarn":
        frequencies *= _yarn(config)
        magnitude *= 1 + 0.1 * math.log(config.factor)
    return Rope(frequencies, magnitude, config.interleaved)


def _yarn(config: RopeConfig) -> npt.NDArray[np.float64]:
    """Factor on each frequency (arXiv:2309.00071, section 3.2): 1 where a pair turns at least beta_fast times within
    the original context, 1 / factor where it turns at most beta_slow times, a ramp between, its ends whole pairs.
    """

    def pair(turns: float) -> float:
        return config.dims * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(pair(config.beta_fast)), 0)
    high = min(math.ceil(pair(config.beta_slow)), config.dims - 1)
    ramp = np.clip((np.arange(config.dims // 2) - low) / max(high - low, 0.001), 0, 1)
    return 1 - ramp + ramp / config.factor
